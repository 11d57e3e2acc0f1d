"""How a worker joins its job: it serves or finds the store, makes sure whose it is, and waits in the rendezvous.

Until the rendezvous is complete a store that goes away is looked for again: the chief may have been started anew.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lockstep._torch_compat import Store
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.heartbeat import Heartbeat, Peers
from lockstep.membership.rendezvous import (
    SILENT_S,
    Deadline,
    Rendezvous,
    WorkerInfo,
    job_terms,
    rank_taken_error,
    this_process,
)
from lockstep.membership.store import (
    OWNER_KEY,
    REFUSED_KEY,
    PortTakenError,
    StoreAddress,
    StoreBrokenError,
    StoreClient,
    StoreKeys,
    StoreSilentError,
    find_store,
    listen,
    read,
    run_key,
    serve_store,
)

_NOT_OPENED = "its store is there, but worker 0 has not opened the job yet"
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 0.25
_RUN_POLL_S = 0.2
_PORT_FREED_S = 5.0
_JOB_LENGTH = 300


@dataclass(frozen=True, kw_only=True)
class JoinResult:
    """What a worker has after it joined its job.

    Args:
        workers: what every worker told the others, in rank order.
        keys: the keys of this run in the store.
        address: where this process reaches the store.
        client: a client of the store.
        server: the store itself on the chief that serves it; it is served as long as this reference is held.
    """

    workers: tuple[WorkerInfo, ...]
    keys: StoreKeys
    address: StoreAddress
    client: StoreClient
    server: Store | None


class JobJoiner:
    """One attempt of a worker to join its job.

    Args:
        spec: the cluster and this worker's rank.
        timeout_s: how long to wait for all workers.
        lost_after_s: after how many seconds of silence a worker is lost.
        info: what to tell the other workers.
    """

    def __init__(self, spec: ClusterSpec, *, timeout_s: float, lost_after_s: float, info: Mapping[str, int]) -> None:
        self._spec = spec
        self._deadline = Deadline(spec.name(spec.index), timeout_s)
        self._port_freed_by = time.monotonic() + min(_PORT_FREED_S, timeout_s)
        self._lost_after_s = lost_after_s
        self._info = info
        self._token = secrets.token_hex(8)
        self._pause = threading.Event()
        self._serves = spec.index == 0 and not spec.store_is_served
        self._server: Store | None = None

    def join(self) -> JoinResult:
        """Waits until all workers of the job are there.

        Raises:
            ClusterError: the store cannot be served or reached, or the rendezvous failed.
        """
        try:
            host, port = self._serve() if self._serves else self._spec.chief_address
            poll_s = _SHORTEST_POLL_S
            while True:
                try:
                    return self._try(find_store(host, port))
                except (StoreBrokenError, StoreSilentError) as error:
                    self._deadline.check(
                        f"{self._spec.name(0)}, where the job's store is ({error})",
                        "start it, or correct its address, its port or a firewall",
                    )
                self._pause.wait(poll_s)
                poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)
        finally:
            self._server = None  # else a caught error would keep the store alive through its frames

    def _serve(self) -> tuple[str, int]:
        host, port = self._spec.chief_address if self._spec.workers[0] else ("127.0.0.1", 0)
        while True:
            try:
                listener = listen(host, port, self._spec.name(0))
            except PortTakenError:  # perhaps by an earlier run, which lets the others read how it ended
                if time.monotonic() > self._port_freed_by:
                    raise
                self._pause.wait(_LONGEST_POLL_S)
            else:
                bound_host, bound_port = listener.getsockname()[:2]
                self._server = serve_store(listener)
                return bound_host, bound_port

    def _try(self, address: StoreAddress) -> JoinResult:
        client = StoreClient(address.connect)
        try:
            client.call(lambda store: _claim_store(store, self._spec), self._deadline.left_s)
            run = self._open_run(client) if self._spec.index == 0 else self._find_run(client)
            rendezvous = Rendezvous(self._spec, self._worker_info(address), client, run, self._deadline)
            try:
                workers = rendezvous.wait()
            except (StoreBrokenError, StoreSilentError):
                raise
            except BaseException as error:
                rendezvous.leave(error)
                raise
            keys = StoreKeys.of_run(self._spec, run)
            return JoinResult(workers=workers, keys=keys, address=address, client=client, server=self._server)
        except BaseException:
            client.close()
            raise

    def _open_run(self, client: StoreClient) -> str:
        """Opens a run as worker 0: the first, or the next one if a launcher's store has seen an earlier one end.

        A worker 0 of an earlier run that was killed has not said that it ended: silence is enough.
        """
        silent_s = max(SILENT_S, self._lost_after_s / 4)
        peers = Peers(1, -1, time.monotonic())
        while True:
            run = client.call(lambda store: _newest_run(store, self._spec), self._deadline.left_s)
            now_s = time.monotonic()
            peers.update([run.heartbeat], now_s)
            if not run.name or run.failure or run.heartbeat.ended or peers.silence_s(0, now_s) > silent_s:
                return client.call(partial(_open_next_run, spec=self._spec, run=run.name), self._deadline.left_s)
            if peers.beats(0) > 1:
                raise rank_taken_error(self._spec, WorkerInfo.from_json(run.chief))
            self._deadline.check("an earlier run of this job to end", "end its processes")
            self._pause.wait(_RUN_POLL_S)

    def _find_run(self, client: StoreClient) -> str:
        run = client.call(lambda store: read(store, run_key(self._spec)), self._deadline.left_s)
        if not run:
            raise StoreBrokenError(_NOT_OPENED)
        return run

    def _worker_info(self, address: StoreAddress) -> WorkerInfo:
        own = self._spec.index
        host = address.host if self._serves else address.own_host
        if not self._serves and self._spec.host(own):
            with listen(self._spec.host(own), 0, self._spec.name(own)) as bound:
                host = str(bound.getsockname()[0])
        return WorkerInfo(
            rank=own,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=host,
            token=self._token,
            info=dict(self._info),
            terms=job_terms(self._spec, self._lost_after_s),
        )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The newest run: its name, worker 0's heartbeat and info, and its failure report. All empty before the first."""

    name: str
    heartbeat: Heartbeat
    chief: str
    failure: str


def _newest_run(store: Store, spec: ClusterSpec) -> _Run:
    name = read(store, run_key(spec))
    keys = StoreKeys.of_run(spec, name or "0")
    return _Run(
        name=name,
        heartbeat=Heartbeat.from_json(read(store, keys.heartbeat(0))),
        chief=read(store, keys.rank(0)),
        failure=read(store, keys.failure),
    )


def _open_next_run(store: Store, spec: ClusterSpec, run: str) -> str:
    return store.compare_set(run_key(spec), run, str(int(run or "0") + 1)).decode()


def _claim_store(store: Store, spec: ClusterSpec) -> None:
    """Makes sure that the store belongs to this job. A process of another job only leaves a note that it was here.

    Raises:
        ClusterError: the store belongs to another job.
        StoreBrokenError: it belongs to none yet.
    """
    mine = json.dumps({"job_id": spec.job_id, "workers": spec.workers})
    found = store.compare_set(OWNER_KEY, "", mine if spec.index == 0 else "").decode()
    if not found:
        raise StoreBrokenError(_NOT_OPENED)
    owner = json.loads(found)
    if owner["job_id"] != spec.job_id:
        own = _describe_job(spec.job_id, spec.workers)
        store.set(REFUSED_KEY, f"{this_process()}, of {own}")
        raise ClusterError(
            f"{spec.name(spec.index)} belongs to {own}, but the store at {spec.workers[0]} belongs to "
            f"{_describe_job(**owner)}. Give all workers of a job the same cluster and job id, and every job its own "
            "port"
        )


def _describe_job(job_id: str, workers: Sequence[str]) -> str:
    return f"job {job_id!r} with the workers {', '.join(workers)}"[:_JOB_LENGTH]
