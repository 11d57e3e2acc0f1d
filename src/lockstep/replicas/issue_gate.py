"""The gate through which the replicas of one device issue work: as many at once as it is wide."""

from __future__ import annotations

import threading
from collections import deque


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

    def _withdraw(self, gate: threading.Lock) -> None:
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self.release()
