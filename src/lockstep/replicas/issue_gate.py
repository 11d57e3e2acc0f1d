"""The gate through which the replicas of one device issue work: as many at once as it is wide."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext

from lockstep.replicas.device.driver import StreamEvent


class IssueGate:
    """A first-come, first-served gate for ``width`` replicas, and the issue slot of replicas on a CPU.

    It is made anew for every run, so that an aborted run cannot leave it closed.
    """

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self._free = width
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """Takes a slot, after those who asked earlier. One that is interrupted passes on a slot it was just given."""
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
            self._withdraw(gate)
            raise

    def release(self) -> None:
        """Gives the slot to whoever has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def check(self) -> None:
        """Checks what the replica has done before others use its results."""

    def record_event(self) -> StreamEvent | None:
        """An event behind what the replica has queued; None on a CPU, which has finished when a call returns."""
        return None

    def with_default_rng(self) -> AbstractContextManager[None]:
        """A block of work for all replicas, which draws no random numbers of this one's device."""
        return nullcontext()

    def naming_device(self) -> AbstractContextManager[None]:
        """A block in which an out-of-memory error names the logical device."""
        return nullcontext()

    def _withdraw(self, gate: threading.Lock) -> None:
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self.release()
