"""From samples to the rows of the tables: medians over rounds, speed-up, efficiency, parts of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.errors import DataError
from lockstep.scaling.parts import StepTimes, mean_times
from lockstep.scaling.plan import Configuration
from lockstep.scaling.rounds import Sample
from lockstep.scaling.training import Record


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration over all its rounds.

    Args:
        configuration: which.
        steps_an_epoch: of its global batch.
        timed_steps: in each round.
        epoch_s: seconds an epoch, the median over the rounds; see ``epoch_s``.
        examples_per_s: median over the rounds.
        median_ms: of all timed steps together.
        p10_ms: a tenth of the steps were faster.
        p90_ms: a tenth of the steps were slower.
        speed_up: its examples/s over those of one device in the same round, and of these the median.
        loss: of the last timed step, median over the rounds.
        parts: means over the steps of all rounds.
    """

    configuration: Configuration
    steps_an_epoch: int
    timed_steps: int
    epoch_s: float
    examples_per_s: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    speed_up: float
    loss: float
    parts: StepTimes

    @property
    def efficiency(self) -> float:
        """The speed-up over the hardware, counted in that of one device; 1 is perfect."""
        return self.speed_up / self.configuration.hardware

    @property
    def epochs_timed(self) -> int:
        """Whole epochs that were timed in each round; 0 where the epoch is extrapolated."""
        return self.timed_steps // self.steps_an_epoch

    @property
    def timed(self) -> str:
        """What ``epoch_s`` rests on, in words."""
        if self.epochs_timed:
            return "whole epoch" if self.epochs_timed == 1 else f"{self.epochs_timed} epochs"
        return f"{self.timed_steps} of {self.steps_an_epoch} steps"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, between two values in proportion.

    Example:
        >>> percentile([10.0, 20.0, 30.0], 75)
        25.0
    """
    if not values:
        raise DataError("the percentile of no values was asked for; give at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def rows_of(configurations: Sequence[Configuration], samples: Sequence[Sample]) -> list[Row]:
    """A row for each configuration, the first of which is the one device that all are compared with."""
    reference = _of(configurations[0], samples)
    return [_row(configuration, _of(configuration, samples), reference) for configuration in configurations]


def epoch_s(record: Record) -> float:
    """Seconds an epoch: as timed where whole epochs were, else the seconds a timed step times the steps an epoch."""
    return record.timed_s / len(record.step_ms) * record.steps_an_epoch


def examples_per_s(record: Record) -> float:
    """Over the timed steps, waiting for the input included."""
    return record.examples / record.timed_s


def speed_up(own: Sequence[Sample], reference: Sequence[Sample]) -> float:
    """The median over the rounds of (examples/s / those of the reference in the same round).

    Raises:
        DataError: no common round.
    """
    base = {sample.round: examples_per_s(sample.record) for sample in reference}
    ratios = [examples_per_s(sample.record) / base[sample.round] for sample in own if sample.round in base]
    if not ratios:
        raise DataError("two configurations without a common round were to be compared; run them in the same rounds")
    return median(ratios)


def _row(configuration: Configuration, own: Sequence[Sample], reference: Sequence[Sample]) -> Row:
    records = [sample.record for sample in own]
    steps = [step for record in records for step in record.step_ms]
    return Row(
        configuration=configuration,
        steps_an_epoch=records[0].steps_an_epoch,
        timed_steps=len(records[0].step_ms),
        epoch_s=median(map(epoch_s, records)),
        examples_per_s=median(map(examples_per_s, records)),
        median_ms=median(steps),
        p10_ms=percentile(steps, 10),
        p90_ms=percentile(steps, 90),
        speed_up=speed_up(own, reference),
        loss=median(record.loss for record in records),
        parts=mean_times([step for record in records for step in record.parts]),
    )


def _of(configuration: Configuration, samples: Sequence[Sample]) -> list[Sample]:
    own = [sample for sample in samples if sample.configuration == configuration]
    if not own:
        raise DataError(f"{configuration.name!r} has no sample; measure it first")
    return own
