"""The meeting point of the replica threads of one run: all meet at the same collective, or all get an error at once.

    replica 0 --- meet(all_reduce) --.
    replica 1 --- meet(all_reduce) ---+-- last to arrive combines the values -- all go on with the result
    replica 2 --- returned -----------'   (or: "replica 2 has returned; replicas 0, 1 wait in all_reduce")

It knows what every replica is doing, so a meeting that can no longer take place is found when it becomes impossible
and not by waiting. It does no arithmetic: what is combined, and how, is the caller's. On GPUs, which run behind the
program, it keeps their order too: each replica arrives with a mark behind its work, what is combined is queued behind
all of these, and what the replicas queue next behind that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.errors import CollectiveError


class DeviceEvent(Protocol):
    """A place in what has been queued on a device that runs behind the program, as a GPU does."""

    def precede(self) -> None:
        """What the calling thread queues from now on runs behind it."""


class IssueSlot(Protocol):
    """One replica's side of the gate; called by that replica's thread alone, and but for ``acquire`` in its turn."""

    def acquire(self) -> None:
        """Waits for the turn."""

    def release(self) -> None:
        """Gives it up."""

    def check(self) -> None:
        """Before others build on what the replica has done.

        Raises:
            DeviceMemoryError: it has taken more memory than its device's share.
        """

    def mark(self) -> DeviceEvent | None:
        """Where the replica has come to on its device; None where nobody has to wait for that."""

    def follow(self, marks: Sequence[DeviceEvent]) -> None:
        """What the replica queues from now on runs behind ``marks``."""

    def aside(self) -> AbstractContextManager[None]:
        """For what the replica's thread does for all replicas: it draws no random numbers of this one's."""

    def naming_device(self) -> AbstractContextManager[None]:
        """Inside the block, a device that has no more memory is named in the error.

        Raises:
            DeviceMemoryError: in place of torch's own error.
        """


class CombineStreams(Protocol):
    """Where the devices of a run do what is done once for all replicas."""

    def behind(self, marks: Sequence[DeviceEvent]) -> AbstractContextManager[None]:
        """Inside the block the calling thread queues work for all, behind ``marks``."""

    def marks(self) -> Sequence[DeviceEvent]:
        """Where it has come to: behind them runs what builds on it."""


class IssueGate:
    """A first-come, first-served gate, made anew for every run so that an aborted run cannot leave it closed.

    Args:
        width: how many holders at once; at least 1.
    """

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self._free = width
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """Takes a turn, after those who asked earlier. Holders always give theirs back, on errors too.

        A replica of a failed run is interrupted wherever it is, here too; a turn that it was just given goes on then.
        """
        gate = threading.Lock()
        gate.acquire()
        try:
            with self._lock:
                if self._free > 0:
                    self._free -= 1
                    return
                self._waiting.append(gate)
            gate.acquire()
        except BaseException:
            self._give_up(gate)
            raise

    def release(self) -> None:
        """Gives the turn to the one who has waited longest, or back to the gate."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def check(self) -> None:
        """A CPU's share has no limit."""

    def mark(self) -> DeviceEvent | None:
        """A CPU has done what it was told."""
        return None

    def follow(self, marks: Sequence[DeviceEvent]) -> None:
        """For a replica beside others on GPUs, which reads what they computed."""
        for mark in marks:
            mark.precede()

    def aside(self) -> AbstractContextManager[None]:
        """The replica's function mode sees to it."""
        return nullcontext()

    def naming_device(self) -> AbstractContextManager[None]:
        """The host's memory is nobody's share."""
        return nullcontext()

    def _give_up(self, gate: threading.Lock) -> None:
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self.release()


SIGNALS_SEEN_EVERY_S = 0.2
"""Python can miss a Ctrl-C that comes just before a wait begins, and would see it only when the wait ends."""


class ReplicaStopped(BaseException):
    """Unwinds a replica whose run has ended elsewhere. Not an ``Exception``, so that user code does not swallow it."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a replica has entered: ``name`` must be equal on all replicas, ``where`` is for messages."""

    name: str
    where: str


@dataclass(slots=True)
class _Meeting:
    calls: dict[int, Call] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    marks: list[DeviceEvent] = field(default_factory=list)
    done: bool = False
    result: Any = None
    behind: Sequence[DeviceEvent] = ()


class ReplicaBarrier:
    """One run's meeting point.

    Args:
        replicas: how each replica is called in messages, such as ``"replica 1 (cpu:1)"``, in replica order.
        timeout_s: how many seconds a replica waits in one collective before it reports who has not come.
        common: where GPUs do what is combined; None where there are none.
    """

    def __init__(self, replicas: Sequence[str], timeout_s: float, common: CombineStreams | None = None) -> None:
        self._replicas = tuple(replicas)
        self._timeout_s = timeout_s
        self._common = common
        # A plain lock, taken and given back in one step each by "with": an interrupted replica cannot leave it taken.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._meeting = _Meeting()
        self._left: dict[int, str] = {}
        self._cause: BaseException | None = None

    @property
    def cause(self) -> BaseException | None:
        """The first error of this run, the one to report; None while there is none."""
        return self._cause

    @property
    def missing(self) -> list[str]:
        """The replicas that have neither returned nor failed."""
        with self._lock:
            return [name for replica, name in enumerate(self._replicas) if replica not in self._left]

    def meet(self, replica: int, call: Call, value: Any, combine: Callable[[list[Any]], Any], turn: IssueSlot) -> Any:
        """Waits for all replicas at ``call``; the last to arrive runs ``combine``, whose result all receive.

        Every replica must call it. ``turn`` is given up while waiting.

        Raises:
            CollectiveError: (on the replica that finds it) the replicas did not meet at the same collective.
            DeviceMemoryError: (on the replica) it has taken more memory than its device's share.
            ReplicaStopped: the run has ended because of another replica.
        """
        turn.check()
        mark = turn.mark()
        with self._lock:
            self._stop_if_ended()
            meeting = self._meeting
            meeting.calls[replica] = call
            meeting.values[replica] = value
            if mark is not None:
                meeting.marks.append(mark)
            self._check(meeting)
            complete = len(meeting.calls) == len(self._replicas)
        if complete:
            result = self._complete(meeting, combine)
        else:
            turn.release()
            try:
                result = self._wait(meeting)
            finally:
                turn.acquire()
        turn.follow(meeting.behind)
        return result

    def leave(self, replica: int, error: BaseException | None = None) -> None:
        """Notes that a replica has returned, or failed with ``error``; those who wait for it are told."""
        with self._lock:
            self._left[replica] = "has returned" if error is None else f"failed with {type(error).__name__}"
            if error is not None and not isinstance(error, ReplicaStopped):
                self._end(error)
            elif self._cause is None and self._meeting.calls:
                self._end(self._explain(self._meeting))
            self._changed.notify_all()

    def stop_if_ended(self) -> None:
        """For a replica that has been waiting elsewhere: is there still a run to take part in?

        Raises:
            ReplicaStopped: the run has ended because of another replica.
        """
        with self._lock:
            self._stop_if_ended()

    def abort(self, cause: BaseException) -> None:
        """Ends the run from outside, as Ctrl-C does: every replica stops at its next collective."""
        with self._lock:
            self._end(cause)

    def wait_until_settled(self) -> None:
        """Waits until every replica has returned or failed, or the run has an error. For the owner of the run."""
        with self._lock:
            while self._cause is None and len(self._left) < len(self._replicas):
                self._changed.wait(SIGNALS_SEEN_EVERY_S)

    def wait_until_left(self, timeout_s: float | None) -> bool:
        """Waits until every replica has returned or failed; False if ``timeout_s`` seconds pass first."""
        with self._lock:
            return self._changed.wait_for(lambda: len(self._left) == len(self._replicas), timeout_s)

    def _complete(self, meeting: _Meeting, combine: Callable[[list[Any]], Any]) -> Any:
        values = [meeting.values[replica] for replica in range(len(self._replicas))]
        try:
            if self._common is None:
                result = combine(values)
            else:
                with self._common.behind(meeting.marks):
                    result = combine(values)
                meeting.behind = self._common.marks()
        except BaseException as error:
            self.abort(error)
            raise
        with self._lock:
            self._stop_if_ended()
            meeting.result, meeting.done = result, True
            meeting.values.clear()
            meeting.marks.clear()
            self._meeting = _Meeting()
            self._changed.notify_all()
        return result

    def _wait(self, meeting: _Meeting) -> Any:
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            while not meeting.done:
                self._stop_if_ended()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    error = self._explain(meeting, f"nobody else came within {self._timeout_s:g} s: ")
                    self._end(error)
                    raise error
            return meeting.result

    def _check(self, meeting: _Meeting) -> None:
        if self._left or len({call.name for call in meeting.calls.values()}) > 1:
            error = self._explain(meeting)
            self._end(error)
            raise error

    def _stop_if_ended(self) -> None:
        if self._cause is not None:
            raise ReplicaStopped

    def _end(self, cause: BaseException) -> None:
        if self._cause is None:
            self._cause = cause
        self._changed.notify_all()

    def _explain(self, meeting: _Meeting, reason: str = "") -> CollectiveError:
        states = []
        for replica, name in enumerate(self._replicas):
            call = meeting.calls.get(replica)
            place = f" at {call.where}" if call and call.where else ""
            state = f"waits in {call.name}{place}" if call else self._left.get(replica, "is still running")
            states.append(f"{name} {state}")
        return CollectiveError(
            f"the replicas did not meet at the same collective: {reason}{'; '.join(states)}. "
            "Every replica must call the same collectives in the same order"
        )
