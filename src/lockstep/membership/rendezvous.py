"""How a worker joins its job: it serves or finds the store, claims its rank there, and waits until all are there.

A rank is claimed by compare-and-set, so the first process has it as long as it lives. The next process of the same rank
takes it over when the first goes silent, until worker 0 finds every rank claimed and completes the rendezvous. Until
then a store that goes away is looked for again: the chief may have been started anew.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar

import torch

from lockstep._torch_compat import Store
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.failure_report import FailureReport, describe_exception
from lockstep.membership.heartbeat import Heartbeat, Peers
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

T = TypeVar("T")

PROTOCOL = 1
"""The version of what workers exchange. Raise it when two versions of lockstep could not understand each other."""

_SILENT_S = 3.0  # after so many seconds of silence another process may take over a rank
_FIRST_REPORT_S = 2.0
_REPORT_EVERY_S = 5.0
_SHORTEST_TIMEOUT_S = 0.2
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 0.25
_RUN_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 1.0
_LINGER_S = 1.0
_PORT_FREED_S = 5.0
_JOB_LENGTH = 300
_NOT_OPENED = "its store is there, but worker 0 has not opened the job yet"

_log = logging.getLogger("lockstep")


class Deadline:
    """The end of a wait, after ``timeout_s``. Every few seconds it reports what ``who`` still waits for."""

    def __init__(self, who: str, timeout_s: float, *, report: Callable[[str], None] = _log.warning) -> None:
        self._report = report
        self._who = who
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._next_report = time.monotonic() + _FIRST_REPORT_S

    @property
    def left_s(self) -> float:
        """The time that a single call may still take: a little, even after the deadline."""
        return max(_SHORTEST_TIMEOUT_S, self._end - time.monotonic())

    def check(self, missing: str, advice: str) -> None:
        """Returns before the deadline, after a warning if one is due.

        Raises ClusterError if the deadline has passed; it names what is missing and ends with the advice.
        """
        now = time.monotonic()
        if now >= self._end:
            raise ClusterError(f"{self._who} waited {self._timeout_s:g} s for {missing}; {advice}")
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            self._report(f"{self._who} waits for {missing}; {self._end - now:.0f} s left")


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What a worker tells the others at the rendezvous."""

    rank: int  # its rank
    host: str  # the name of its machine
    pid: int  # its process id there
    address: str  # the IP address where it listens for the others
    token: str  # distinguishes this process from another that claims the same rank
    info: Mapping[str, int]  # what the caller of ``join`` has to tell the others
    terms: Mapping[str, str]  # what must be equal on all workers, by name

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> WorkerInfo:
        """Reads an info from the store. Raises ClusterError if the text is something else."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ClusterError(
                f"the job's store has an unreadable worker info ({error}); start all workers with the same lockstep"
            ) from None

    @property
    def process(self) -> str:
        """The process as messages name it: "process 4242 on hostb"."""
        return f"process {self.pid} on {self.host}"


def this_process() -> str:
    """This process as messages name it: "process 4242 on hostb"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def job_terms(spec: ClusterSpec, lost_after_s: float) -> dict[str, str]:
    """What must be equal on all workers; the first difference is the one reported."""
    try:
        own_version = version("torch-lockstep")
    except PackageNotFoundError:  # run from its source without being installed
        own_version = "not installed"
    return {
        "protocol": str(PROTOCOL),
        "lockstep": own_version,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "number of workers": str(spec.num_workers),
        "workers": ", ".join(spec.workers),
        "lost_after_s": f"{lost_after_s:g}",
    }


def find_disagreement(mine: WorkerInfo, theirs: WorkerInfo, names: tuple[str, str]) -> str:
    """The first term that differs between two workers, which messages call ``names``; empty if none does."""
    for term in [*mine.terms, *(term for term in theirs.terms if term not in mine.terms)]:
        here, there = mine.terms.get(term, "unknown"), theirs.terms.get(term, "unknown")
        if here != there:
            return (
                f"{names[1]} and {names[0]} disagree: {term} is {there} on {names[1]} and {here} on {names[0]}; "
                "start all workers with the same cluster, settings and versions"
            )
    return ""


def _find_unreachable(mine: WorkerInfo, theirs: WorkerInfo, names: tuple[str, str]) -> str:
    """Which of two workers on different machines listens on a loopback address, as a sentence; empty if none does."""
    for info, name in ((mine, names[0]), (theirs, names[1])):
        if mine.host != theirs.host and ipaddress.ip_address(info.address).is_loopback:
            return (
                f"{name} listens at {info.address}, which only its own machine ({info.host}) reaches, but the workers "
                f"are on {mine.host} and {theirs.host}; give its address in the network, or correct its /etc/hosts"
            )
    return ""


def _rank_taken_error(spec: ClusterSpec, holder: WorkerInfo) -> ClusterError:
    """The error for a process whose rank another live process has."""
    return ClusterError(
        f"{spec.name(spec.index)} is there already: {holder.process}; this is {this_process()}. "
        "Give every process its own index, or end the other process first"
    )


class JoinResult(NamedTuple):
    """What a worker has after it joined its job."""

    workers: tuple[WorkerInfo, ...]
    keys: StoreKeys
    address: StoreAddress
    client: StoreClient
    server: Store | None


class JobJoiner:
    """One attempt of a worker to join its job within ``timeout_s``. ``info`` is what it tells the other workers."""

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

        Raises ClusterError if the store cannot be served or reached, or the rendezvous failed.
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
            return JoinResult(workers, StoreKeys.of_run(self._spec, run), address, client, self._server)
        except BaseException:
            client.close()
            raise

    def _open_run(self, client: StoreClient) -> str:
        """Opens a run as worker 0: the first, or the next one if a launcher's store has seen an earlier one end.

        A worker 0 of an earlier run that was killed has not said that it ended: silence is enough.
        """
        key = run_key(self._spec)

        def newest(store: Store) -> tuple[str, Heartbeat, str, str]:
            run = read(store, key)
            keys = StoreKeys.of_run(self._spec, run or "0")
            heartbeat = Heartbeat.from_json(read(store, keys.heartbeat(0)))
            return run, heartbeat, read(store, keys.rank(0)), read(store, keys.failure)

        silent_s = max(_SILENT_S, self._lost_after_s / 4)
        peers = Peers(1, -1, time.monotonic())
        while True:
            run, heartbeat, chief, failure = client.call(newest, self._deadline.left_s)
            now_s = time.monotonic()
            peers.update([heartbeat], now_s)
            if not run or failure or heartbeat.ended or peers.silence_s(0, now_s) > silent_s:
                own = str(int(run or "0") + 1)
                return client.call(lambda store: store.compare_set(key, run, own), self._deadline.left_s).decode()  # noqa: B023
            if peers.beats(0) > 1:
                raise _rank_taken_error(self._spec, WorkerInfo.from_json(chief))
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


def _claim_store(store: Store, spec: ClusterSpec) -> None:
    """Makes sure that the store belongs to this job. A process of another job only leaves a note that it was here.

    Raises ClusterError if the store belongs to another job, StoreBrokenError if it belongs to none yet.
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
            f"{_describe_job(**owner)}. Give all workers of a job the same cluster and job id, and each job its port"
        )


def _describe_job(job_id: str, workers: Sequence[str]) -> str:
    return f"job {job_id!r} with the workers {', '.join(workers)}"[:_JOB_LENGTH]


class _View(NamedTuple):
    """What one poll read from the store; tuples are in rank order."""

    run: str
    ranks: tuple[str, ...]
    heartbeats: tuple[Heartbeat, ...]
    complete: str
    failure: str
    refused: str


class Rendezvous:
    """One worker's part in the rendezvous of one run. ``info`` is what this worker tells the others."""

    def __init__(self, spec: ClusterSpec, info: WorkerInfo, client: StoreClient, run: str, deadline: Deadline) -> None:
        self._spec, self._own = spec, spec.index
        self._info = info
        self._text = info.to_json()
        self._client = client
        self._keys = StoreKeys.of_run(spec, run)
        self._rank_key = self._keys.rank(spec.index)
        self._run = run
        self._deadline = deadline
        self._has_rank = False
        self._beats_when_full: tuple[tuple[str, ...], list[int]] | None = None
        self._count = 0
        self._peers = Peers(spec.num_workers, spec.index, time.monotonic())

    def wait(self) -> tuple[WorkerInfo, ...]:
        """Waits until all workers are there and agree; returns their infos in rank order.

        Raises:
            ClusterError: a worker is missing at the deadline or disagrees, or another process has this rank.
            StoreBrokenError: the store is gone, or worker 0 has opened a newer run: join again.
        """
        pause, poll_s = threading.Event(), _SHORTEST_POLL_S
        while True:
            view = self._call(self._poll)
            self._peers.update(view.heartbeats, time.monotonic())
            if infos := self._advance(view):
                return infos
            pause.wait(poll_s)
            poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)

    def leave(self, error: BaseException) -> None:
        """Gives up: worker 0 ends the rendezvous for all, any other frees its rank for a process that comes later."""
        try:
            if self._own != 0:
                self._client.call(lambda store: store.compare_set(self._rank_key, self._text, ""), _ANSWER_TIMEOUT_S)
                return
            reason = str(error)
            if not isinstance(error, ClusterError):
                reason = describe_exception(self._spec.name(0), error, "the rendezvous")
            report = FailureReport(worker=0, reporter=0, reason=reason)
            self._client.call(lambda store: self._keys.write_failure(store, report), _ANSWER_TIMEOUT_S)
            self._linger()
        except (StoreBrokenError, StoreSilentError):
            return  # nobody is left to tell

    def _poll(self, store: Store) -> _View:
        """Claims or keeps the rank, writes a heartbeat, and reads everything. Runs in the client's thread."""
        failure, complete = read(store, self._keys.failure), read(store, self._keys.complete)
        if not (self._has_rank or failure or complete):
            self._has_rank = store.compare_set(self._rank_key, "", self._text).decode() == self._text
        if self._has_rank:
            self._count += 1
            own = Heartbeat(count=self._count, status="the rendezvous", acknowledged=bool(failure))
            store.set(self._keys.heartbeat(self._own), own.to_json())
        ranks = range(self._spec.num_workers)
        return _View(
            run=read(store, run_key(self._spec)),
            ranks=tuple(read(store, self._keys.rank(rank)) for rank in ranks),
            heartbeats=tuple(Heartbeat.from_json(read(store, self._keys.heartbeat(rank))) for rank in ranks),
            complete=complete,
            failure=failure,
            refused=read(store, REFUSED_KEY),
        )

    def _advance(self, view: _View) -> tuple[WorkerInfo, ...] | None:
        """Acts on what a poll has read: all infos if the rendezvous is complete, None if it goes on."""
        if view.run != self._run:
            raise StoreBrokenError("worker 0 has opened the job again")
        if not self._has_rank:
            self._wait_for_rank(view)
            return None
        if view.failure:
            raise FailureReport.from_json(view.failure).error()
        if view.complete:
            infos = tuple(WorkerInfo.from_json(text) for text in json.loads(view.complete))
            own = infos[self._own]
            if own.token != self._info.token:  # this process was silent and another took its rank over
                raise _rank_taken_error(self._spec, own)
            return infos
        present = {rank: WorkerInfo.from_json(text) for rank, text in enumerate(view.ranks) if text}
        self._compare(present)
        silent = self._peers.silent(time.monotonic(), _SILENT_S)
        missing = [rank for rank in range(self._spec.num_workers) if rank not in present or rank in silent]
        if not missing and self._own == 0 and self._all_alive(view.ranks):
            self._call(lambda store: store.set(self._keys.complete, json.dumps(view.ranks)))
            return tuple(present[rank] for rank in range(self._spec.num_workers))
        what = ", ".join(self._spec.name(rank) for rank in missing) or f"{self._spec.name(0)} to begin"
        note = f" ({view.refused}, was here and was refused)" if view.refused else ""
        self._deadline.check(what + note, "start them all, or look at why they ended")
        return None

    def _all_alive(self, ranks: tuple[str, ...]) -> bool:
        """Whether all sent a heartbeat since the last rank was claimed: a worker that came early may have died."""
        beats = [self._peers.beats(rank) for rank in range(self._spec.num_workers)]
        if self._beats_when_full is None or self._beats_when_full[0] != ranks:
            self._beats_when_full = (ranks, beats)
        return all(now > then for now, then in zip(beats, self._beats_when_full[1], strict=True))

    def _wait_for_rank(self, view: _View) -> None:
        """Another process has the rank, or the run has begun or ended: waits for the rank or for the next run."""
        text = view.ranks[self._own]
        if view.failure or not text or self._peers.has_ended(self._own):
            self._deadline.check("an earlier run of this job to end", "end its processes, or look at what they do")
            return
        holder = WorkerInfo.from_json(text)
        if self._peers.beats(self._own) > 1:
            raise _rank_taken_error(self._spec, holder)
        if view.complete or self._peers.silence_s(self._own, time.monotonic()) <= _SILENT_S:
            self._deadline.check(
                f"the end of the run in which {self._spec.name(self._own)} was {holder.process}",
                "end all workers and start them again",
            )
        else:
            taken = self._call(lambda store: store.compare_set(self._rank_key, text, self._text))
            self._has_rank = taken == self._text.encode()

    def _compare(self, present: dict[int, WorkerInfo]) -> None:
        """Raises, on all workers, what makes it impossible for this one and another to train together."""
        for rank, info in present.items():
            names = (self._spec.name(self._own), f"worker {rank} ({info.process})")
            if reason := find_disagreement(self._info, info, names) or _find_unreachable(self._info, info, names):
                report = FailureReport(worker=rank, reporter=self._own, reason=reason)
                raise self._call(lambda store, report=report: self._keys.write_failure(store, report)).error()  # type: ignore[misc]

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

    def _linger(self) -> None:
        """Lets the workers that are there read the failure before the store goes away."""
        pause, until = threading.Event(), time.monotonic() + _LINGER_S
        absent = self._peers.silent(time.monotonic(), _SILENT_S)
        while time.monotonic() < until and not self._peers.all_acknowledged(absent):
            view = self._client.call(self._poll, _ANSWER_TIMEOUT_S)
            self._peers.update(view.heartbeats, time.monotonic())
            pause.wait(_SHORTEST_POLL_S)
