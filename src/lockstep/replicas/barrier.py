"""The barrier at which the replica threads of one run meet.

    replica 0 --- meet(all_reduce) --.
    replica 1 --- meet(all_reduce) ---+-- the last to arrive combines the values -- all go on with the result
    replica 2 --- returned -----------'   (or: "replica 2 has returned; replicas 0, 1 wait in all_reduce")

The barrier knows what every replica is doing, so it reports a meeting that cannot take place at once. On GPUs the
combination is queued behind events of all replicas, and what they queue next runs behind it. A replica gives its issue
slot up while it waits: with as many slots as replicas all issue work in parallel, with one they take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.errors import CollectiveError
from lockstep.replicas.device.driver import StreamEvent
from lockstep.replicas.device.streams import GpuSlot, RunStreams
from lockstep.replicas.issue_gate import IssueGate

SIGNALS_SEEN_EVERY_S = 0.2
"""Python can miss a Ctrl-C that comes just before a wait begins, and would see it only when the wait ends."""
IssueSlot = IssueGate | GpuSlot
"""A replica's permission to issue work. Only that replica's thread uses it."""


class ReplicaStopped(BaseException):
    """Unwinds a replica whose run has ended elsewhere. Not an ``Exception``, so that user code does not swallow it."""


class Call(NamedTuple):
    """A collective that a replica has entered: its name, equal on all replicas, and the user's line, for messages."""

    name: str
    where: str


@dataclass(slots=True)
class _Meeting:
    calls: dict[int, Call] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    events: list[StreamEvent] = field(default_factory=list)
    is_complete: bool = False
    result: Any = None
    result_events: Sequence[StreamEvent] = ()


class ReplicaBarrier:
    """The barrier of the replicas of one run, whose names are ``replicas``. ``cause`` is the first error of the run.

    A replica waits ``timeout_s`` in a collective before it reports who is missing. GPUs combine values on ``streams``.
    """

    def __init__(self, replicas: Sequence[str], timeout_s: float, streams: RunStreams | None = None) -> None:
        self._replicas = tuple(replicas)
        self._timeout_s = timeout_s
        self._streams = streams
        # A plain lock, taken and released in one step each by "with": an interrupted replica cannot leave it taken.
        self._lock = threading.Lock()
        # Two, since the owner of the run has nothing to do at a meeting: woken there, its thread would take the
        # interpreter from the replicas, twice or more in each step.
        self._met = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._meeting = _Meeting()
        self._departures: dict[int, str] = {}
        self.cause: BaseException | None = None

    @property
    def missing(self) -> list[str]:
        with self._lock:
            return [name for replica, name in enumerate(self._replicas) if replica not in self._departures]

    def meet(self, replica: int, call: Call, value: Any, combine: Callable[[list[Any]], Any], slot: IssueSlot) -> Any:
        """Waits until all replicas are at ``call``; the last to arrive runs ``combine``, whose result all receive.

        ``slot`` is given up during the wait.

        Raises:
            CollectiveError: (in the replica that finds it) the replicas are not at the same collective.
            DeviceMemoryError: (in the replica) it has taken more memory than the limit of its device.
            ReplicaStopped: the run has ended because of another replica.
        """
        event = None
        if isinstance(slot, GpuSlot):
            slot.check()
            event = slot.record_event()
        with self._lock:
            if self.cause is not None:
                raise ReplicaStopped
            meeting = self._meeting
            meeting.calls[replica] = call
            meeting.values[replica] = value
            if event is not None:
                meeting.events.append(event)
            if self._departures or next(iter(meeting.calls.values())).name != call.name:
                raise self._end(self._explain(meeting))
            complete = len(meeting.calls) == len(self._replicas)
        if complete:
            result = self._complete(meeting, combine)
        else:
            slot.release()
            try:
                result = self._wait(meeting)
            finally:
                slot.acquire()
        for event in meeting.result_events:
            event.wait()
        return result

    def leave(self, replica: int, error: BaseException | None = None) -> None:
        """Notes that a replica has returned, or failed with ``error``. The last one wakes the owner of the run."""
        with self._lock:
            self._departures[replica] = "has returned" if error is None else f"failed with {type(error).__name__}"
            if error is not None and not isinstance(error, ReplicaStopped):
                self._end(error)
            elif self.cause is None and self._meeting.calls:
                self._end(self._explain(self._meeting))
            if len(self._departures) == len(self._replicas):
                self._settled.notify_all()

    def stop_if_ended(self) -> None:
        """Raises ReplicaStopped in a replica that has waited elsewhere, if the run has ended meanwhile."""
        with self._lock:
            if self.cause is not None:
                raise ReplicaStopped

    def abort(self, cause: BaseException) -> None:
        """Ends the run from outside, as Ctrl-C does: every replica stops at its next collective."""
        with self._lock:
            self._end(cause)

    def wait_until_settled(self) -> None:
        """Waits until every replica has returned or failed, or the run has an error. For the owner of the run."""
        with self._lock:
            while self.cause is None and len(self._departures) < len(self._replicas):
                self._settled.wait(SIGNALS_SEEN_EVERY_S)

    def wait_until_left(self, timeout_s: float | None) -> bool:
        """Waits until every replica has returned or failed; False if ``timeout_s`` seconds pass first."""
        with self._lock:
            return self._settled.wait_for(lambda: len(self._departures) == len(self._replicas), timeout_s)

    def _complete(self, meeting: _Meeting, combine: Callable[[list[Any]], Any]) -> Any:
        values = [meeting.values[replica] for replica in range(len(self._replicas))]
        try:
            if self._streams is None:
                result = combine(values)
            else:
                with self._streams.after(meeting.events):
                    result = combine(values)
                meeting.result_events = self._streams.record_events()
        except BaseException as error:
            self.abort(error)
            raise
        with self._lock:
            if self.cause is not None:
                raise ReplicaStopped
            meeting.result, meeting.is_complete = result, True
            meeting.values.clear()
            meeting.events.clear()
            self._meeting = _Meeting()
            self._met.notify_all()
        return result

    def _wait(self, meeting: _Meeting) -> Any:
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            while not meeting.is_complete:
                if self.cause is not None:
                    raise ReplicaStopped
                if not self._met.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise self._end(self._explain(meeting, f"nobody else came within {self._timeout_s:g} s: "))
            return meeting.result

    def _end(self, cause: BaseException) -> BaseException:
        if self.cause is None:
            self.cause = cause
        self._met.notify_all()
        self._settled.notify_all()
        return cause

    def _explain(self, meeting: _Meeting, reason: str = "") -> CollectiveError:
        states = []
        for replica, name in enumerate(self._replicas):
            call = meeting.calls.get(replica)
            if call is None:
                states.append(f"{name} {self._departures.get(replica, 'is still running')}")
            else:
                states.append(f"{name} waits in {call.name}{f' at {call.where}' if call.where else ''}")
        return CollectiveError(
            f"the replicas did not meet at the same collective: {reason}{'; '.join(states)}. "
            "Every replica must call the same collectives in the same order"
        )
