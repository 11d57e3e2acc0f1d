"""Times the steps of a contender.

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
    """What one process measured."""

    first_step_s: float  # from the start of the trial's processes to the end of the first step
    step_s: tuple[float, ...]  # seconds of each timed step
    cpu_s: float  # CPU seconds, user and system, of all threads of this process over all timed steps
    exchange_s: tuple[float, ...]  # seconds of each timed step in exchange and update; empty if not measured
    loss: float  # of the last step
    trained: int = 0  # parameters that the optimizer changes; 0 if unknown
    sent_bytes: int = 0  # what left this process's host in all timed steps; 0 if not counted
    device_reserved_mb: float = 0.0  # what torch's allocator has taken of a GPU by the last step
    device_used_mb: float = 0.0  # what all processes together have of that GPU inside the last step
    notes: tuple[str, ...] = ()  # lines for the report


class StepTimer:
    """Times steps, and reports when the last is done.

    Args:
        warm_up: steps that are not timed.
        steps: steps that are timed.
        started_s: ``time.monotonic()`` at the start of the trial.
        report: receives the record inside the last step, while the contender still holds all that it holds in a step.
        interface: the network interface whose traffic is counted; empty counts none.

    Attributes:
        total: steps in all.
        trained, device_reserved_mb, device_used_mb, notes: as in the record; the contender sets them.
    """

    def __init__(
        self, *, warm_up: int, steps: int, started_s: float, report: Callable[[StepRecord], None], interface: str = ""
    ) -> None:
        self._warm_up, self._started_s, self._report, self._interface = warm_up, started_s, report, interface
        self.total = warm_up + steps
        self.trained = 0
        self.device_reserved_mb = self.device_used_mb = 0.0
        self.notes: Iterable[str] = ()
        self._ends: list[float] = []
        self._exchanges: list[float] = []
        self._first_step_s = 0.0
        self._cpu_before_s = 0.0
        self._sent_before = 0

    def record_step(self, loss: float, exchange_s: float | None = None) -> None:
        """Call it at the end of every step.

        Args:
            loss: of this step's global batch, or of the part that this process knows.
            exchange_s: seconds of it spent in exchange and update.
        """
        self._ends.append(time.perf_counter())
        done = len(self._ends)
        if done == 1:
            self._first_step_s = time.monotonic() - self._started_s
        if done == self._warm_up:
            self._cpu_before_s, self._sent_before = _cpu_s(), _sent_bytes(self._interface)
        if exchange_s is not None and done > self._warm_up:
            self._exchanges.append(exchange_s)
        if done == self.total:
            self._report(self._record(loss))

    def _record(self, loss: float) -> StepRecord:
        return StepRecord(
            first_step_s=self._first_step_s,
            step_s=tuple(after - before for before, after in pairwise(self._ends[self._warm_up - 1 :])),
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
