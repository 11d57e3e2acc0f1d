"""How a worker joins its job: it serves or finds the store, registers its rank there, and waits until all are there.

    chief          opens a run, and waits until all ranks are registered; again, to see who still lives; completes it
    other workers  register their ``WorkerInfo`` in the newest run, until it is complete

A registration appends the rank to a list, so the chief reads each info once. Another worker makes one request a look,
and reads all infos once, compressed: what is equal for all of them takes no room.

A process that registers replaces an earlier one of its rank. A store that goes away is looked for again until the
deadline: the chief may have been started anew.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from lockstep._torch_compat import Store
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.failure_report import FailureReport, describe_exception
from lockstep.membership.heartbeat import Heartbeat
from lockstep.membership.started_group import AddressBoard
from lockstep.membership.store import (
    OWNER_KEY,
    PortTakenError,
    StoreAddress,
    StoreBrokenError,
    StoreClient,
    StoreKeys,
    StoreSilentError,
    UnknownHostError,
    find_store,
    listen,
    read,
    read_all,
    run_key,
    serve_store,
)
from lockstep.membership.worker_info import (
    JOB_LENGTH,
    WorkerInfo,
    describe_workers,
    find_disagreement,
    infos_from_text,
    infos_to_text,
    job_terms,
)

T = TypeVar("T")

_FIRST_REPORT_S = 2.0
_REPORT_EVERY_S = 5.0
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 0.25
_POLLING_WORKERS = 128  # more of them look less often, so that the store has no more to do
_ANSWER_TIMEOUT_S = 1.0
_LINGER_S = 1.0  # for the others to read why the rendezvous ended, before the store goes away
_PORT_FREED_S = 5.0
_SHOWN_NAMES = 8
_NOT_OPENED = "its store is there, but it has not opened the job yet"


class Deadline:
    """The end of a wait, after ``timeout_s``. Every few seconds it reports what ``who`` still waits for."""

    def __init__(self, who: str, timeout_s: float, report: Callable[[str], None]) -> None:
        self._who, self._timeout_s, self._report = who, timeout_s, report
        self._end = time.monotonic() + timeout_s
        self._next_report = time.monotonic() + _FIRST_REPORT_S

    def check(self, missing: str, advice: str) -> None:
        """Returns before the deadline, after a warning if one is due; after it raises ClusterError with the advice."""
        now = time.monotonic()
        if now >= self._end:
            raise ClusterError(f"{self._who} waited {self._timeout_s:g} s for {missing}; {advice}")
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            self._report(f"{self._who} waits for {missing}; {self._end - now:.0f} s left")


def join_names(names: Sequence[str]) -> str:
    """A list for a message, which names the first few of many."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_SHOWN_NAMES])} and {more} more"


class JoinResult(NamedTuple):
    """What a worker has after it joined its job."""

    workers: tuple[WorkerInfo, ...]
    keys: StoreKeys
    address: StoreAddress
    client: StoreClient
    server: Store | None


def join_job(
    spec: ClusterSpec,
    *,
    timeout_s: float,
    lost_after_s: float,
    info: Mapping[str, int],
    report: Callable[[str], None],
    board: AddressBoard | None = None,
) -> JoinResult:
    """Waits until all workers of the job are there. ``report`` takes lines about who is still missing.

    The chief tells the others on the ``board`` where its store listens; without one it is where the cluster says.

    Raises ClusterError if the store cannot be served or reached, or the rendezvous failed.
    """
    deadline = Deadline(spec.name(spec.index), timeout_s, report)
    serves = spec.index == 0 and not spec.store_is_served
    server, address = _serve(spec, deadline, timeout_s, any_port=board is not None) if serves else (None, None)
    if board is not None and address is not None:
        board.tell(*address)
    pause, poll_s = threading.Event(), _SHORTEST_POLL_S
    try:
        while True:
            try:
                host, port = address or (spec.chief_address if board is None else board.ask())
                rendezvous = _Rendezvous(spec, find_store(host, port), deadline, lost_after_s, info)
                return JoinResult(*rendezvous.join(board.clear if board is not None and serves else None), server)
            except (StoreBrokenError, StoreSilentError) as error:
                deadline.check(
                    f"{spec.name(0)}, where the job's store is ({error})",
                    "start it, or correct its address, its port or a firewall",
                )
            pause.wait(poll_s)
            poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)
    finally:
        del server  # else a caught error would keep the store alive through its frames


def _serve(spec: ClusterSpec, deadline: Deadline, timeout_s: float, *, any_port: bool) -> tuple[Store, tuple[str, int]]:
    """Serves the store at the chief's address; with ``any_port``, at a free port of its host if that one is taken."""
    host, port = spec.chief_address if spec.workers[0] else ("127.0.0.1", 0)
    port_freed_by = time.monotonic() + min(_PORT_FREED_S, timeout_s)
    while True:
        try:
            listener = listen(host, port, spec.name(0))
        except PortTakenError:  # perhaps by an earlier run, which lets the others read how it ended
            if any_port:
                port = 0
                continue
            if time.monotonic() > port_freed_by:
                raise
        except UnknownHostError as error:  # a machine may learn its own name late, as a pod of Kubernetes does
            deadline.check(f"its own name ({error})", "give an address that can be looked up here")
        else:
            where = listener.getsockname()[:2]
            return serve_store(listener), where
        threading.Event().wait(_LONGEST_POLL_S)


class _Rendezvous:
    """One attempt of a worker to join the job whose store is at ``address``."""

    def __init__(
        self, spec: ClusterSpec, address: StoreAddress, deadline: Deadline, lost_after_s: float, info: Mapping[str, int]
    ) -> None:
        self._spec, self._rank, self._deadline, self._address = spec, spec.index, deadline, address
        self._info = WorkerInfo(
            rank=spec.index,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=self._listening_address(),
            token=secrets.token_hex(8),
            info=dict(info),
            terms=job_terms(spec, lost_after_s),
        )
        self._info_text = self._info.to_json()
        self._client = StoreClient(address.connect)
        self._run = ""  # in which this process has registered
        self._holder_beats: dict[str, int] = {}  # of processes of this rank in earlier runs: when they were first seen
        # What the chief knows of the run:
        self._arrived: dict[int, WorkerInfo] = {}
        self._arrivals_read = 0  # entries of the list of arrivals
        self._missing_names = ""  # the missing workers that it has written down

    def join(
        self, once_registered: Callable[[], None] | None = None
    ) -> tuple[tuple[WorkerInfo, ...], StoreKeys, StoreAddress, StoreClient]:
        """Returns what a ``JoinResult`` has of this attempt. The chief calls ``once_registered`` before it completes.

        Raises ClusterError if a worker is missing at the deadline or disagrees, or another process has this rank, and
        StoreBrokenError if the store is gone or not in use yet: try again.
        """
        try:
            self._call(self._claim_store)
            workers = (
                self._gather(once_registered)
                if self._rank == 0
                else self._repeat(self._poll, "start it, or look at what it does")
            )
            return workers, StoreKeys(self._spec, self._run), self._address, self._client
        except BaseException:
            self._client.close()
            raise

    def _listening_address(self) -> str:
        if self._rank == 0 and not self._spec.store_is_served:
            return self._address.host
        # A launcher's variables name the chief's host alone. The address by which this process reaches the store is one
        # that the others can answer.
        if not self._spec.host(self._rank):
            return self._address.own_host
        with listen(self._spec.host(self._rank), 0, self._spec.name(self._rank)) as bound:
            return str(bound.getsockname()[0])

    def _claim_store(self, store: Store) -> None:
        """Makes sure that the store belongs to this job, and changes nothing in another job's."""
        job = json.dumps({"job_id": self._spec.job_id, "workers": describe_workers(self._spec.workers)})
        stored = store.compare_set(OWNER_KEY, "", job if self._rank == 0 else "").decode()
        if not stored:
            raise StoreBrokenError(_NOT_OPENED)
        owner = json.loads(stored)
        if owner["job_id"] != self._spec.job_id:
            raise ClusterError(
                f"{self._spec.name(self._rank)} belongs to {_describe_job(**json.loads(job))}, but "
                f"the store at {self._spec.workers[0]} belongs to {_describe_job(**owner)}. Give all workers of a job "
                "the same cluster and job id, and each job its port"
            )

    # ---- the chief

    def _gather(self, once_registered: Callable[[], None] | None) -> tuple[WorkerInfo, ...]:
        try:
            # test_a_worker_that_dies_in_the_rendezvous_is_replaced_by_its_next_process: the first run may have been
            # completed by processes that have ended since.
            for _ in range(2):  # who registers a second time is still there
                self._run = self._call(self._open_run)
                infos = self._repeat(self._poll_arrivals, "start them all, or look at why they ended")
            if once_registered is not None:
                once_registered()
            self._call(lambda store: store.set(StoreKeys(self._spec, self._run).complete, infos_to_text(infos)))
        except (StoreBrokenError, StoreSilentError):
            raise
        except BaseException as error:
            self._give_up(error)
            raise
        return infos

    def _open_run(self, store: Store) -> str:
        """Opens a run, which has keys of its own: a launcher's store may have seen others."""
        before = read(store, run_key(self._spec))
        run = str(int(before or "0") + 1)
        StoreKeys(self._spec, run).open(store, self._info_text)
        self._arrived, self._arrivals_read, self._missing_names = {}, 0, ""
        if store.compare_set(run_key(self._spec), before, run).decode() != run:
            raise StoreBrokenError("another process opens the job at the same moment")
        return run

    def _poll_arrivals(self, store: Store) -> tuple[WorkerInfo, ...] | str:
        keys = StoreKeys(self._spec, self._run)
        run, arrivals = read_all(store, [run_key(self._spec), keys.arrivals])
        if run != self._run:
            raise ClusterError(f"another process is {self._spec.name(0)} too; give every process its own index")
        new = arrivals.split()[self._arrivals_read :]
        # Only what came since the last look is read: with 1,024 workers the chief would otherwise read all infos at
        # every look.
        self._arrivals_read += len(new)
        for info in map(WorkerInfo.from_json, read_all(store, [keys.rank(rank) for rank in sorted(map(int, new))])):
            names = (self._spec.name(0), f"{self._spec.noun} {info.rank} ({info.process})")
            if reason := find_disagreement(self._info, info, names):
                raise ClusterError(reason)
            self._arrived[info.rank] = info
        ranks = range(self._spec.num_workers)
        missing = join_names([self._spec.name(rank) for rank in ranks if rank not in self._arrived])
        # The others read this list at every look, to name the workers that they wait for; it is written only when it
        # changes.
        if self._missing_names != missing:
            store.set(keys.missing, missing)
            self._missing_names = missing
        return missing or tuple(self._arrived[rank] for rank in ranks)

    def _give_up(self, error: BaseException) -> None:
        """Ends the rendezvous for all workers that are there."""
        reason = str(error)
        if not isinstance(error, ClusterError):
            reason = describe_exception(self._spec.name(0), error, "the rendezvous")
        report, keys = (
            FailureReport(worker=0, reporter=0, reason=reason, permanent=True),
            StoreKeys(self._spec, self._run),
        )
        try:
            self._client.call(lambda store: keys.write_failure(store, report), _ANSWER_TIMEOUT_S)
        except (StoreBrokenError, StoreSilentError):
            return  # nobody is left to tell
        if not self._spec.store_is_served:
            threading.Event().wait(_LINGER_S)

    # ---- the other workers

    def _poll(self, store: Store) -> tuple[WorkerInfo, ...] | str:
        if not self._run:
            return self._register(store, read(store, run_key(self._spec)))
        rank, keys = self._rank, StoreKeys(self._spec, self._run)
        run, holder, missing, complete, failure = read_all(
            store, [run_key(self._spec), keys.rank(rank), keys.missing, keys.complete, keys.failure]
        )
        if run != self._run:
            return self._register(store, run)
        if failure:
            raise FailureReport.from_json(failure).error()
        if holder != self._info_text:
            raise self._rank_taken(holder)
        if complete:
            chief = WorkerInfo.from_json(read(store, keys.rank(0)))
            if reason := find_disagreement(chief, self._info, (self._spec.name(0), self._spec.name(rank))):
                raise ClusterError(reason)
            return infos_from_text(complete)
        return missing or f"{self._spec.name(0)} to begin"

    def _register(self, store: Store, run: str) -> str:
        """Registers this process in the run, the newest one, if that has not ended. Returns what it waits for."""
        if not run:
            raise StoreBrokenError(_NOT_OPENED)
        rank, keys = self._rank, StoreKeys(self._spec, run)
        complete, failure = read_all(store, [keys.complete, keys.failure])
        if failure and self._run:
            raise FailureReport.from_json(failure).error()
        # A job that ended may be formed again by the same processes on the same store, as under a launcher that serves
        # it: test_the_same_processes_can_form_the_job_again.
        if complete or failure:
            # A store that a launcher serves lasts for many runs, and a process of this rank may live in one of them.
            if complete and not failure and not self._spec.store_is_served:
                self._check_holder(keys, store)
            return "the end of an earlier run of this job"
        keys.register(store, rank, self._info_text)
        self._run = run
        return f"{self._spec.name(0)} to begin"

    def _check_holder(self, keys: StoreKeys, store: Store) -> None:
        """Raises ClusterError if the process that holds this rank in a run sends heartbeats.

        One that is silent was killed and this one started in its place, as operators of Kubernetes do. The others find
        that out within ``lost_after_s``, and end the run.
        """
        holder = read(store, keys.rank(self._rank))
        heartbeat = Heartbeat.from_json(read(store, keys.heartbeat(self._rank)))
        before = self._holder_beats.setdefault(holder, heartbeat.count)
        if heartbeat.count != before and not heartbeat.ended:
            raise self._rank_taken(holder)

    def _rank_taken(self, holder: str) -> ClusterError:
        process = WorkerInfo.from_json(holder).process
        return ClusterError(
            f"{self._spec.name(self._rank)} is there already: {process}; this is {self._info.process}. "
            "Give every process its own index, or end the other process first"
        )

    # ---- all workers

    def _repeat(self, poll: Callable[[Store], tuple[T, ...] | str], advice: str) -> tuple[T, ...]:
        """Polls until there is a result, before the deadline; a text says what is missing."""
        pause, run = threading.Event(), self._run
        shortest_s, longest_s = poll_limits_s(1 if self._rank == 0 else self._spec.num_workers)
        poll_s = shortest_s
        while isinstance(result := self._call(poll), str):
            self._deadline.check(result, advice)
            if run != self._run:  # everybody registers in it now: what comes next comes soon
                run, poll_s = self._run, shortest_s
            pause.wait(poll_s)
            poll_s = min(1.2 * poll_s, longest_s)
        return result

    def _call(self, call: Callable[[Store], T]) -> T:
        """Makes a call to the store; a store that does not answer is reported, and given up at the deadline."""
        future = self._client.submit(call)
        while True:
            try:
                return future.result(_ANSWER_TIMEOUT_S)
            except TimeoutError:
                self._deadline.check(
                    f"an answer of the job's store at {self._spec.name(0)}",
                    "its process is stopped or the network has failed",
                )


def poll_limits_s(workers: int) -> tuple[float, float]:
    """The shortest and the longest pause between two looks at the store, for each of so many ``workers``."""
    # With 1,024 workers a look each 2 s, so that the store answers some 512 requests a second for any number of them.
    share = max(1.0, workers / _POLLING_WORKERS)
    return share * _SHORTEST_POLL_S, share * _LONGEST_POLL_S


def _describe_job(job_id: str, workers: str) -> str:
    return f"job {job_id!r} with the workers {workers}"[:JOB_LENGTH]
