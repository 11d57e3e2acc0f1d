"""The stopwatch that a contender carries through its steps.

The peers' programs load this very file in environments without torch, so it needs Python alone and imports nothing of
ours.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one process saw."""

    first_step_s: float  # from the start of the trial's processes to the end of the first step
    step_s: tuple[float, ...]  # seconds of each timed step
    cpu_s: float  # CPU seconds of this process, all its threads, over all timed steps: user and system together
    # seconds of each timed step that went into exchange and update; empty where they are not told apart
    exchange_s: tuple[float, ...]
    loss: float  # of the last step
    trained: int = 0  # parameters that the optimizer changes; 0 where nobody has said
    sent_bytes: int = 0  # what left this process's host in all timed steps; 0 where it is not counted
    device_reserved_mb: float = 0.0  # what torch's allocator has taken of a GPU by the last step; 0 where there is none
    # what all processes together have of that GPU inside the last step; 0 where there is none
    device_used_mb: float = 0.0
    notes: tuple[str, ...] = ()  # what the contender has to say of itself, a line each


class StepTimer:
    """Times steps, and reports when the last is done.

    Args:
        warm_up: steps that are not timed.
        steps: steps that are.
        started_s: ``time.monotonic()`` at the start of the trial.
        report: receives the record inside the last lap, while the contender still holds all that it holds in a step.
        interface: the network interface whose traffic is counted; empty counts none.

    Attributes:
        total: steps in all.
        trained: parameters that the optimizer changes; the contender sets it.
        device_reserved_mb: as in the record; set before the last lap where there is a GPU.
        device_used_mb: likewise.
        notes: likewise; read in the last lap.
    """

    def __init__(
        self,
        *,
        warm_up: int,
        steps: int,
        started_s: float,
        report: Callable[[StepRecord], None],
        interface: str = "",
    ) -> None:
        self._warm_up = warm_up
        self.total = warm_up + steps
        self.trained = 0
        self.device_reserved_mb = self.device_used_mb = 0.0
        self.notes: Iterable[str] = ()
        self._started_s = started_s
        self._report = report
        self._interface = interface
        self._ends: list[float] = []
        self._exchanges: list[float] = []
        self._first_step_s = 0.0
        self._cpu_before_s = 0.0
        self._sent_before = 0

    def lap(self, loss: float, exchange_s: float | None = None) -> None:
        """A step is done.

        Args:
            loss: of this step's global batch, or of the part that this process knows.
            exchange_s: seconds of it spent in exchange and update.
        """
        self._ends.append(time.perf_counter())
        if len(self._ends) == 1:
            self._first_step_s = time.monotonic() - self._started_s
        if len(self._ends) == self._warm_up:
            self._cpu_before_s = _cpu_s()
            self._sent_before = _sent_bytes(self._interface)
        if exchange_s is not None and len(self._ends) > self._warm_up:
            self._exchanges.append(exchange_s)
        if len(self._ends) == self.total:
            self._report(self._record(loss))

    def _record(self, loss: float) -> StepRecord:
        timed = self._ends[self._warm_up - 1 :]
        return StepRecord(
            first_step_s=self._first_step_s,
            step_s=tuple(after - before for before, after in pairwise(timed)),
            cpu_s=_cpu_s() - self._cpu_before_s,
            exchange_s=tuple(self._exchanges),
            loss=loss,
            trained=self.trained,
            sent_bytes=_sent_bytes(self._interface) - self._sent_before,
            device_reserved_mb=self.device_reserved_mb,
            device_used_mb=self.device_used_mb,
            notes=tuple(self.notes),
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _sent_bytes(interface: str) -> int:
    """What has left through the interface of the caller's network namespace; 0 where none is named."""
    if not interface:
        return 0
    with Path("/proc/thread-self/net/dev").open(encoding="ascii") as lines:
        counters = dict(line.strip().split(":") for line in lines if ":" in line)
    return int(counters[interface].split()[8])
