"""Turns: how many replicas of one physical device issue work at the same time.

A replica holds a turn while it computes and gives it up while it waits in a collective. With as many turns as
replicas they all issue in parallel; with one they hand over to each other at collectives; the numbers are the same.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Mark(Protocol):
    """A place in what has been queued on a device that runs behind the program, as a GPU does."""

    def precede(self) -> None:
        """What the calling thread queues from now on runs behind it."""


class Turn(Protocol):
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

    def mark(self) -> Mark | None:
        """Where the replica has come to on its device; None where nobody has to wait for that."""

    def follow(self, marks: Sequence[Mark]) -> None:
        """What the replica queues from now on runs behind ``marks``."""

    def aside(self) -> AbstractContextManager[None]:
        """For what the replica's thread does for all replicas: it draws no random numbers of this one's."""

    def naming_device(self) -> AbstractContextManager[None]:
        """Inside the block, a device that has no more memory is named in the error.

        Raises:
            DeviceMemoryError: in place of torch's own error.
        """


class Common(Protocol):
    """Where the devices of a run do what is done once for all replicas."""

    def behind(self, marks: Sequence[Mark]) -> AbstractContextManager[None]:
        """Inside the block the calling thread queues work for all, behind ``marks``."""

    def marks(self) -> Sequence[Mark]:
        """Where it has come to: behind them runs what builds on it."""


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

    def check(self) -> None:
        """A CPU's share has no limit."""

    def mark(self) -> Mark | None:
        """A CPU has done what it was told."""
        return None

    def follow(self, marks: Sequence[Mark]) -> None:
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
