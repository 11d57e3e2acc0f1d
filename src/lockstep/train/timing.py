"""The clock of one pass over data: what the progress line and the history read. It only counts; it prints nothing."""

from __future__ import annotations

import time
from statistics import median

from lockstep.train.history import EpochTiming


class StepClock:
    """Times the steps of one pass: ``start`` before a batch is asked for, ``stop`` when its step is done.

    What lies between ``stop`` and ``start``, or ``pause`` and ``start``, is not the step's: callbacks, above all.

    Example:
        >>> clock = StepClock()
        >>> clock.start()
        >>> clock.stop(rows=8)
        >>> clock.steps, clock.examples
        (1, 8)
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._before_pause = 0.0
        self._step_seconds: list[float] = []
        self.examples = 0

    def start(self) -> None:
        """A batch is about to be asked for, or its step to be run."""
        self._started = time.perf_counter()

    def pause(self) -> None:
        """The batch is there; what comes until the next ``start`` is not timed."""
        self._before_pause += time.perf_counter() - self._started

    def stop(self, *, rows: int) -> None:
        """The step is done; ``rows`` is the number of examples of all replicas."""
        self._step_seconds.append(self._before_pause + time.perf_counter() - self._started)
        self._before_pause = 0.0
        self.examples += rows

    def extend(self) -> None:
        """What passed since ``start`` is the last step's too: the device was still at it."""
        if self._step_seconds:
            self._step_seconds[-1] += time.perf_counter() - self._started

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self._step_seconds)

    @property
    def seconds(self) -> float:
        """The sum over the steps done."""
        return sum(self._step_seconds)

    @property
    def median_step_s(self) -> float:
        """The median step in seconds; 0 before the first."""
        return median(self._step_seconds) if self._step_seconds else 0.0

    @property
    def examples_per_s(self) -> float:
        """Examples a second so far; 0 before the first step."""
        return self.examples / self.seconds if self._step_seconds else 0.0

    def summary(self, epoch: int) -> EpochTiming:
        """The record of the pass for ``History.timing``."""
        return EpochTiming(
            epoch=epoch,
            seconds=self.seconds,
            steps=self.steps,
            examples=self.examples,
            median_step_s=self.median_step_s,
        )
