"""A worker's membership of its job: who else is in it, and whether all of them still are.

join ----> roll call: all are there, and agree      close, failed ----> the others know why this one is gone
     `---> watch: beats every second; check() raises the one error that ends the job on every worker
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError, LockstepError, UsageError
from lockstep.membership.failure_report import Ending, describe_failure, shorten_traceback
from lockstep.membership.heartbeat import Watch, WorkerEndedError
from lockstep.membership.join import Entered, enter

T = TypeVar("T")

_LOOK_EVERY_S = 0.25


def call_watched(call: Callable[[], T], check: Callable[[], None], name: str = "lockstep-call") -> T:
    """What ``call`` returns or raises, or what ``check`` raises while waiting for it: then the call is left to itself.

    Args:
        call: runs in a thread of its own, which ends with the interpreter if it never returns.
        check: called four times a second.
        name: the thread's name.
    """
    done: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(call, done), name=name, daemon=True).start()
    while True:
        try:
            return done.result(_LOOK_EVERY_S)
        except TimeoutError:
            if done.done():  # just now; or it is the call's own error
                return done.result()
            check()


def _fulfil(call: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(call())
    except BaseException as raised:  # noqa: BLE001 - not swallowed: whoever waits for the call raises it
        done.set_exception(raised)


def join(
    spec: ClusterSpec, *, timeout_s: float, lost_after_s: float = 15.0, info: Mapping[str, int] | None = None
) -> Membership:
    """Joins the job: serves or reaches its store, and waits until all workers are there. Every worker must call it.

    Who is missing is said every few seconds through the logger "lockstep", as a warning.

    Args:
        spec: the cluster, and which of its workers this process is.
        timeout_s: how long to wait for all.
        lost_after_s: after how many seconds of silence a worker is lost; equal on all workers.
        info: what to tell the others at the start.

    Raises:
        ClusterError: somebody did not come, is there twice, or disagrees; or the address cannot be used.
    """
    if spec.task != "worker":
        raise ClusterError(f"an {spec.task} is no member of the training; run it by itself, without joining the job")
    for name, value in (("timeout_s", timeout_s), ("lost_after_s", lost_after_s)):
        if not value > 0:
            raise ClusterError(f"{name}={value!r} is no time to wait; give a number of seconds above 0")
    return Membership(spec, enter(spec, timeout_s=timeout_s, lost_after_s=lost_after_s, info=info or {}), lost_after_s)


class Membership:
    """A worker that is in its job, until ``close`` or the end of the interpreter. Made by ``join``.

    Args:
        spec: the cluster.
        entered: what the roll call brought.
        lost_after_s: after how many seconds of silence a worker is lost.
    """

    def __init__(self, spec: ClusterSpec, entered: Entered, lost_after_s: float) -> None:
        self._spec = spec
        self._lost_after_s = lost_after_s
        self._cards, self._place, self._route = entered.cards, entered.place, entered.route
        self._names = tuple(
            spec.name(card.index) if spec.workers[card.index] else f"worker {card.index} ({card.host})"
            for card in entered.cards
        )
        self._watch = Watch(
            entered.line,
            entered.place,
            self._names,
            spec.index,
            lost_after_s=lost_after_s,
            launcher=f"the launcher at {spec.workers[0]}" if spec.store_is_served else None,
        )
        self._server = entered.server
        self._pid = os.getpid()
        atexit.register(self._end_with_interpreter)

    @property
    def spec(self) -> ClusterSpec:
        """The cluster, and which of its workers this process is."""
        return self._spec

    @property
    def names(self) -> tuple[str, ...]:
        """How messages call the workers, in worker order: "worker 1 (hostb:20001)"."""
        return self._names

    @property
    def infos(self) -> tuple[Mapping[str, int], ...]:
        """Every worker's ``info``, in worker order."""
        return tuple(card.info for card in self._cards)

    @property
    def address(self) -> str:
        """The IP address of this machine that listeners bind to."""
        return self._cards[self._spec.index].address

    @property
    def lost_after_s(self) -> float:
        """After how many seconds of silence a worker is lost."""
        return self._lost_after_s

    def store(self, prefix: str) -> Store:
        """A client of the job's store with a connection of its own, for a process group.

        Args:
            prefix: equal on all workers, and another for every group.
        """
        return self.watched(
            lambda: PrefixStore(f"{self._place.prefix}/groups/{prefix}", self._route.connect()), "the way to the store"
        )

    def watched(self, call: Callable[[], T], waiting_in: str) -> T:
        """Makes a call that depends on other workers and may hang, such as that which makes a process group.

        Args:
            call: runs in a thread of its own; it is left to itself if the job ends meanwhile.
            waiting_in: what this worker waits in, for messages.

        Raises:
            ClusterError: a worker is lost or has failed meanwhile, or a connection broke: then ``explain_broken``'s.
        """
        try:
            return call_watched(call, self.check)
        except LockstepError:
            raise
        except RuntimeError as error:  # what torch raises for a connection that broke
            raise self.explain_broken(error, waiting_in) from error

    def doing(self, text: str) -> None:
        """Notes what this worker does now; it goes out with the next beat. Costs nothing."""
        self._watch.doing = text

    def check(self) -> None:
        """Returns while the job goes on. Cheap, and from any thread: whoever waits calls it again and again.

        Raises:
            ClusterError: a worker is lost, has failed, or has ended while this one still waits for it.
            UsageError: this process is a fork of the worker; it would read what is meant for that one.
        """
        if os.getpid() != self._pid:
            name = self._names[self._spec.index]
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._pid}, which is {name} of this job, and "
                "cannot speak for it; call what reaches other workers in that process"
            )
        self._watch.check()

    def explain_broken(self, error: BaseException, waiting_in: str) -> ClusterError:
        """Why a connection to another worker broke: waits until it is known, and returns the error to raise.

        Args:
            error: what the connection said.
            waiting_in: what this worker waited in.
        """
        others = [
            name
            for name, card in zip(self._names, self._cards, strict=True)
            if card.index != self._spec.index and f"[{card.address}]" in str(error)
        ]
        return self._watch.explain(error, " or ".join(others), waiting_in)

    def elsewhere(self) -> str:
        """Who of the others was last doing something else than this worker, for messages: "worker 1 was last in x"."""
        found = self._watch.elsewhere()
        return ", ".join(f"{self._names[index]} was last in {doing}" for index, doing in found.items())

    def failed(self, error: BaseException) -> None:
        """Tells the others that this worker ends with ``error``. The first cause of a job's end is kept, by all."""
        own = self._spec.index
        if isinstance(error, WorkerEndedError):  # says itself who ended, and for whom that was too early
            reason = str(error)
        else:
            reason = describe_failure(self._names[own], error, self._watch.doing)
        self._watch.end_job(Ending(worker=own, found_by=own, reason=reason, trace=shorten_traceback(error)))

    def subscribe(self, callback: Callable[[ClusterError], None]) -> None:
        """Has ``callback`` called once with the error, in the watch's thread, when another worker is lost or fails.

        A worker that ends in good order is no such case: only who still waits for it learns of that, by ``check``.
        """
        self._watch.end.subscribe(callback)

    def close(self) -> None:
        """Tells the others that this worker has ended. The chief lets them read it first. Idempotent."""
        atexit.unregister(self._end_with_interpreter)
        if os.getpid() != self._pid:
            return  # a fork of the worker, which is none itself
        self._watch.close()
        self._server = None

    def _end_with_interpreter(self) -> None:
        error = getattr(sys, "last_value", None)
        # A notebook keeps the error of a cell long ago there.
        if error is not None and os.getpid() == self._pid and not hasattr(sys, "ps1"):
            self.failed(error)
        self.close()
