"""A worker's membership of its job: who else is in it, and whether all of them still are.

join ----> rendezvous: all are there, and agree     close, report_failure ----> the others know why this one is gone
     `---> heartbeats; check() raises the one error that ends the job on every worker
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakMethod

from lockstep._torch_compat import PrefixStore, Store
from lockstep.checks import check_seconds
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError, LockstepError, UsageError
from lockstep.membership.failure_report import (
    FailureReport,
    describe_exception,
    exit_code_of,
    last_traceback_lines,
)
from lockstep.membership.heartbeat import HeartbeatMonitor, WorkerEndedError
from lockstep.membership.rendezvous import JoinResult, join_job, join_names
from lockstep.membership.started_group import address_board
from lockstep.tracebacks import exit_with_code_of

T = TypeVar("T")

_WATCHDOG_POLL_S = 0.25
_log = logging.getLogger("lockstep")


def join(
    spec: ClusterSpec,
    *,
    timeout_s: float,
    lost_after_s: float = 15.0,
    info: Mapping[str, int] | None = None,
    report: Callable[[str], None] = _log.warning,
) -> Membership:
    """Joins the job: serves or reaches its store, and waits until all workers are there. Every worker must call it.

    Args:
        spec: the cluster and this process's rank in it.
        timeout_s: how long to wait for all workers.
        lost_after_s: after how many seconds of silence a worker is lost; equal on all workers.
        info: what to tell the other workers.
        report: takes a line about who is still missing, every few seconds.

    Raises:
        ClusterError: a worker did not come, is there twice, or disagrees; or the address cannot be used.
    """
    if spec.task != "worker":
        raise ClusterError(f"an {spec.task} does not take part in the training; run it without joining the job")
    for name, value in (("timeout_s", timeout_s), ("lost_after_s", lost_after_s)):
        check_seconds(name, value)
    board = address_board(spec)
    try:
        joined = join_job(
            spec, timeout_s=timeout_s, lost_after_s=lost_after_s, info=info or {}, report=report, board=board
        )
    finally:
        if board is not None:
            board.close()
    return Membership(spec, joined, lost_after_s)


def run_with_watchdog(call: Callable[[], T], check: Callable[[], None]) -> T:
    """Makes a call that may hang, in a thread of its own.

    If ``check``, called four times a second, raises meanwhile, this raises that and leaves the call to its thread,
    which ends with the interpreter.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as raised:  # noqa: BLE001 - raised again by the caller
            outcome.set_exception(raised)

    # A daemon: the call may hang in C++ for ever, and must not keep the interpreter from ending.
    threading.Thread(target=run, name="lockstep-call", daemon=True).start()
    while True:
        try:
            return outcome.result(_WATCHDOG_POLL_S)
        except TimeoutError:
            if outcome.done():  # just now; or it is the call's own error
                return outcome.result()
            check()


class Membership:
    """A worker that has joined its job, until ``close`` or the end of the interpreter. Made by ``join``.

    Attributes:
        spec: the cluster and this process's rank in it.
        names: the workers' names in messages, in rank order: "worker 1 (hostb:20001)".
        infos: every worker's ``info``, in rank order.
        address: the IP address of this machine that listeners bind to.
        lost_after_s: after how many seconds of silence a worker is lost.
    """

    def __init__(self, spec: ClusterSpec, joined: JoinResult, lost_after_s: float) -> None:
        self.spec = spec
        self.names = tuple(
            spec.name(worker.rank) if spec.workers[worker.rank] else f"{spec.noun} {worker.rank} ({worker.host})"
            for worker in joined.workers
        )
        self.infos = tuple(worker.info for worker in joined.workers)
        self.address = joined.workers[spec.index].address
        self.lost_after_s = lost_after_s
        self._workers, self._keys, self._store_address = joined.workers, joined.keys, joined.address
        self._server = joined.server
        self._monitor = HeartbeatMonitor(
            joined.client,
            joined.keys,
            self.names,
            spec.index,
            lost_after_s=lost_after_s,
            launcher=f"the launcher at {spec.workers[0]}" if spec.store_is_served else None,
        )
        # test_a_fork_of_a_member_is_none: a process of a DataLoader has this object too, and no thread that sends
        # heartbeats.
        self._pid, self._closed = os.getpid(), False
        self._monitor.job.subscribe(lambda _: exit_with_code_of(exit_code_of))
        atexit.register(self.close)
        # Before the interpreter waits for the program's threads, which may wait for the other workers for ever. Python
        # has no public function for that; concurrent.futures uses this one. It keeps what it is given.
        report = WeakMethod(self._report_uncaught)
        threading._register_atexit(lambda: (callback := report()) and callback())  # type: ignore[attr-defined]

    def store(self, prefix: str) -> Store:
        """A client of the job's store with a connection of its own, for a process group.

        ``prefix`` is equal on all workers, and different for every group.
        """
        return self.run_with_watchdog(
            lambda: PrefixStore(f"{self._keys.prefix}/groups/{prefix}", self._store_address.connect()),
            "the connection to the store",
        )

    def run_with_watchdog(self, call: Callable[[], T], waiting_in: str) -> T:
        """Makes a call that depends on other workers and may hang. Messages say what this worker is ``waiting_in``.

        Raises ClusterError if a worker was lost or failed meanwhile, or a connection broke.
        """
        try:
            return run_with_watchdog(call, self.check)
        except LockstepError:
            raise
        except RuntimeError as error:  # torch's error for a connection that broke
            raise self.explain_broken(error, waiting_in) from error

    def set_status(self, status: str) -> None:
        """Sets what this worker is doing; it goes out with the next heartbeat. Costs nothing."""
        self._monitor.status = status

    def check(self) -> None:
        """Returns while the job goes on. Cheap, and for any thread: whoever waits calls it again and again.

        Raises:
            ClusterError: a worker is lost, has failed, or has ended while this one still waits for it.
            UsageError: this process is a fork of the worker; it would read what is meant for the worker.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._pid}, which is {self.names[self.spec.index]} of "
                "this job, and cannot act for it; make calls that reach other workers in the process of the worker"
            )
        self._monitor.check()

    def explain_broken(self, error: BaseException, waiting_in: str) -> ClusterError:
        """The error to raise where a connection raised ``error``: waits until it is known why it broke."""
        names = [
            self.names[worker.rank]
            for worker in self._workers
            # gloo writes the address of the other side in brackets; it is all that its error says of who is missing.
            if worker.rank != self.spec.index and f"[{worker.address}]" in str(error)
        ]
        exit_with_code_of(exit_code_of)
        return self._monitor.explain_broken(error, " or ".join(names), waiting_in)

    def describe_other_statuses(self) -> str:
        """What other workers were last doing if it differs from this worker: "worker 1 was last in step 3"."""
        statuses = self._monitor.read_statuses().items()
        own_status = self._monitor.status
        return join_names(
            [f"{self.names[rank]} was last in {status}" for rank, status in statuses if status != own_status]
        )

    def report_failure(self, error: BaseException) -> None:
        """Tells the others that this worker ends with ``error``. All workers keep the first cause of a job's end."""
        reason = str(error)
        if not isinstance(error, WorkerEndedError):  # which says itself who ended too early
            reason = describe_exception(self.names[self.spec.index], error, self._monitor.status)
        self.end_job(reason, last_traceback_lines(error))

    def end_job(self, reason: str, traceback: str = "") -> None:
        """Ends the job: all workers raise ``reason``, unless an earlier one is known."""
        rank = self.spec.index
        self._monitor.fail(FailureReport(worker=rank, reporter=rank, reason=reason, traceback=traceback))

    @property
    def failure(self) -> ClusterError | None:
        """Why the job ended early, as far as is known here; a worker that ended normally is no failure."""
        report = self._monitor.job.failure
        return None if report is None else report.error()

    def subscribe(self, callback: Callable[[ClusterError], None]) -> None:
        """Has ``callback`` called once with the error, in the monitor's thread, when another worker is lost or fails.

        A worker that ends normally is no failure: only a worker that still waits for it learns of that, by ``check``.
        """
        self._monitor.job.subscribe(callback)

    def close(self) -> None:
        """Tells the others that this worker has ended. The chief lets them read that first. Idempotent."""
        atexit.unregister(self.close)
        self._closed = True
        if os.getpid() != self._pid:
            return  # a fork of the worker is not the worker
        self._monitor.close()
        self._server = None

    def _report_uncaught(self) -> None:
        """At the interpreter's end: tells the others of the exception that ended the program, if one has."""
        error = getattr(sys, "last_value", None)
        # A notebook keeps the error of an earlier cell there.
        if error is not None and not self._closed and os.getpid() == self._pid and not hasattr(sys, "ps1"):
            self.report_failure(error)
