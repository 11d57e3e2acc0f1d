"""Times the steps of a contender.

The peers' programs load this very file in environments without torch, so it needs Python alone and imports nothing of
ours.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one process measured."""

    first_step_s: float  # from the start of the trial's processes to the first reading of the clock
    step_s: tuple[float, ...]  # seconds of each timed step, or of a step of each lap
    cpu_s: float  # CPU seconds, user and system, of all threads of this process over all timed steps
    exchange_s: tuple[float, ...]  # seconds of each timed step in exchange and update; empty if not measured
    loss: float  # of the last step
    first_step_cpu_s: float = 0.0  # CPU seconds of this process, and of its launcher if it was named, until then
    trained: int = 0  # parameters that the optimizer changes; 0 if unknown
    sent_bytes: int = 0  # what left this process's host in all timed steps; 0 if not counted
    extra: dict[str, float] = field(default_factory=dict)  # further numbers of a suite, by name
    notes: tuple[str, ...] = ()  # lines for the report


class StepTimer:
    """Times steps, and reports when the last is done.

    warm_up steps | lap steps | lap steps | ...     the clock is read, after ``synchronize``, at each |

    Args:
        warm_up: steps that are not timed.
        steps: steps that are timed, a multiple of ``lap``.
        started_s: ``time.monotonic()`` at the start of the trial.
        report: receives the record inside the last step, while the contender still holds all that it holds in a step.
        interface: the network interface whose traffic is counted; empty counts none.
        lap: steps between two readings of the clock; with more than one, the first reading ends the warm-up.

    Attributes:
        total: steps in all.
        trained, notes: as in the record; the contender sets them.
        extra: gives the record's further numbers, inside the last step; the contender sets it.
        synchronize: waits for the device before the clock is read; the contender sets it.
        launcher: the process that started all of the trial's, whose CPU time until the first step counts too; one of
            them sets it.
    """

    def __init__(
        self,
        *,
        warm_up: int,
        steps: int,
        started_s: float,
        report: Callable[[StepRecord], None],
        interface: str = "",
        lap: int = 1,
    ) -> None:
        self._warm_up, self._started_s, self._report, self._interface = warm_up, started_s, report, interface
        self._lap = lap
        self.total = warm_up + steps
        self.trained = 0
        self.notes: Iterable[str] = ()
        self.extra: Callable[[], dict[str, float]] = dict
        self.synchronize: Callable[[], None] = lambda: None
        self.launcher: int | None = None
        self._done = 0
        self._ends: list[float] = []  # readings of the clock from the end of the warm-up on
        self._exchanges: list[float] = []
        self._first_step_s = 0.0
        self._first_step_cpu_s = 0.0
        self._cpu_before_s = 0.0
        self._sent_before = 0

    def record_step(self, loss: float | Callable[[], float], exchange_s: float | None = None) -> None:
        """Call it at the end of every step.

        Args:
            loss: of this step's global batch, or of the part that this process knows; a function is called in the last
                step alone.
            exchange_s: seconds of it spent in exchange and update.
        """
        self._done += 1
        timed = self._done - self._warm_up
        if exchange_s is not None and timed > 0:
            self._exchanges.append(exchange_s)
        if timed % self._lap or (timed < 0 and self._lap > 1):
            return
        self.synchronize()
        if not self._first_step_s:
            self._first_step_s = time.monotonic() - self._started_s
            self._first_step_cpu_s = _cpu_s() + _cpu_of_s(self.launcher)
        if timed >= 0:
            self._ends.append(time.perf_counter())
        if timed == 0:
            self._cpu_before_s, self._sent_before = _cpu_s(), _sent_bytes(self._interface)
        if self._done == self.total:
            self._report(self._record(loss() if callable(loss) else loss))

    def _record(self, loss: float) -> StepRecord:
        return StepRecord(
            first_step_s=self._first_step_s,
            step_s=tuple((after - before) / self._lap for before, after in pairwise(self._ends)),
            cpu_s=_cpu_s() - self._cpu_before_s,
            exchange_s=tuple(self._exchanges),
            loss=loss,
            first_step_cpu_s=self._first_step_cpu_s,
            trained=self.trained,
            sent_bytes=_sent_bytes(self._interface) - self._sent_before,
            extra=self.extra(),
            notes=tuple(self.notes),
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_of_s(pid: int | None) -> float:
    """CPU seconds of another process; 0 for None."""
    if pid is None:
        return 0.0
    # The name, in parentheses, may have spaces; after it, the 12th and 13th fields are ticks in user and kernel mode.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _sent_bytes(interface: str) -> int:
    """What has left through the interface of the caller's network namespace; 0 where none is named."""
    if not interface:
        return 0
    with Path("/proc/thread-self/net/dev").open(encoding="ascii") as lines:
        counters = dict(line.strip().split(":") for line in lines if ":" in line)
    return int(counters[interface].split()[8])
