"""Figures of each contender over all rounds, and comparisons of two. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Literal

import torch

from benchmarks.harness import Memory, Sample
from benchmarks.trial import Contender, Role


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender on one workload, over all its rounds."""

    contender: Contender
    samples: tuple[Sample, ...]
    # To the best baseline: the median over the rounds of (its median step / the baseline's of the same round).
    ratio: float | None = None

    @cached_property
    def steps(self) -> list[float]:
        """Milliseconds of all timed steps of all rounds."""
        return [step for sample in self.samples for step in sample.step_ms]

    @property
    def median_ms(self) -> float:
        """Of all timed steps together, as are the percentiles."""
        return median(self.steps)

    def percentile_ms(self, percent: float) -> float:
        """The step that so many percent of the steps are faster than."""
        return float(torch.tensor(self.steps, dtype=torch.float64).quantile(percent / 100))

    @property
    def exchange_share(self) -> float | None:
        """Exchange and update as part of the step, the median over the rounds; None if not measured."""
        shares = [median(sample.exchange_ms) / median_step(sample) for sample in self.samples if sample.exchange_ms]
        return median(shares) if shares else None

    def over_rounds(self, value: Callable[[Sample], float]) -> float:
        """The median over the rounds of what a sample has once."""
        return median(map(value, self.samples))

    @property
    def memory(self) -> Memory:
        """Each figure's median over the rounds."""
        peak_mb = self.over_rounds(lambda sample: sample.memory.peak_mb)
        return Memory(peak_mb=peak_mb, pss_mb=self.over_rounds(lambda sample: sample.memory.pss_mb))

    @property
    def first_step_s(self) -> float:
        """The median over the rounds."""
        return self.over_rounds(lambda sample: sample.first_step_s)

    def most(self, name: str) -> float:
        """The largest of an extra number of the suite, over the processes; of that the median over the rounds."""
        return self.over_rounds(lambda sample: max(process[name] for process in sample.extra))

    @property
    def trained(self) -> int:
        return self.samples[0].trained


def samples_of(samples: Iterable[Sample], workload: str, contender: str) -> tuple[Sample, ...]:
    """The samples of one contender on one workload."""
    return tuple(each for each in samples if (each.workload, each.contender) == (workload, contender))


def median_step(sample: Sample) -> float:
    """The median of its steps in milliseconds."""
    return median(sample.step_ms)


def paired_ratios(
    samples: Iterable[Sample], others: Iterable[Sample], value: Callable[[Sample], float] = median_step
) -> tuple[float, ...]:
    """In each round that both have: the value of the first / the value of the second."""
    theirs = {sample.round: value(sample) for sample in others}
    ours = sorted(samples, key=lambda sample: sample.round)
    return tuple(value(sample) / theirs[sample.round] for sample in ours if sample.round in theirs)


def figures_of(contenders: Sequence[Contender], samples: Sequence[Sample], workload: str) -> list[Figures]:
    """The figures of each contender that has samples of the workload, in their order.

    Ratios are to the fastest baseline, without baselines to the first contender.
    """
    own = {contender.name: samples_of(samples, workload, contender.name) for contender in contenders}
    figures = [Figures(contender=each, samples=own[each.name]) for each in contenders if own[each.name]]
    best = fastest(with_role(figures, "baseline")) or next(iter(figures), None)
    if best is None:
        return []
    return [replace(row, ratio=median(paired_ratios(row.samples, best.samples))) for row in figures]


def fastest(figures: Iterable[Figures]) -> Figures | None:
    """The one with the lowest median step."""
    return min(figures, key=lambda row: row.median_ms, default=None)


def with_role(figures: Iterable[Figures], role: Role) -> list[Figures]:
    """Those of one role."""
    return [row for row in figures if row.contender.role == role]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared with what, and the limit that the project has set, if any."""

    text: str
    values: tuple[float, ...]  # one a round, or one over all rounds; empty if something that it needs did not run
    limit: float | None = None
    bound: Literal["at most", "at least", "below"] = "at most"
    unit: str = ""  # of values and limit; empty for a ratio

    @property
    def value(self) -> float | None:
        """The median over the rounds."""
        return median(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """``yes``, ``NO``, ``not measured``, or empty without a limit."""
        if self.limit is None:
            return ""
        if self.value is None:
            return "not measured"
        reached = {
            "at most": self.value <= self.limit,
            "at least": self.value >= self.limit,
            "below": self.value < self.limit,
        }
        return "yes" if reached[self.bound] else "NO"


def compare_steps(
    ours: Figures | None,
    theirs: Figures | None,
    limit: float | None = None,
    *,
    text: str = "",
    bound: Literal["at most", "at least", "below"] = "at most",
) -> Comparison:
    """The step times of two contenders, round by round."""
    values = () if ours is None or theirs is None else paired_ratios(ours.samples, theirs.samples)
    if not text and ours is not None and theirs is not None:
        text = f"step time, {ours.contender.name} / {theirs.contender.name}"
    return Comparison(text=text, values=values, limit=limit, bound=bound)
