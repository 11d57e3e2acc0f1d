"""Turns: how many replicas of one physical device issue work at the same time.

A replica holds a turn while it computes and gives it up while it waits in a collective. With as many turns as
replicas they all issue in parallel; with one they hand over to each other at collectives; the numbers are the same.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol


class Turn(Protocol):
    """One replica's side of the gate; ``acquire`` and ``release`` are called by that replica's thread alone."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


class Turns:
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

    def _give_up(self, gate: threading.Lock) -> None:
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self.release()
