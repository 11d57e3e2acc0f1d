"""From samples to what the tables of many workers show: rows, the part that the link takes, and comparisons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures import Figures, figures_of
from benchmarks.harness import Sample
from benchmarks.trial import Contender
from benchmarks.workers.roster import free_name, is_halved

ONE_HOST_LIMIT = 1.0
"""Our step time with two workers on this machine over DDP's with two processes."""
TWO_HOSTS_LIMIT = 0.8
"""Our step time with two hosts of two replicas over DDP's with two processes on each."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender.

    Args:
        figures: what every benchmark shows.
        free_ms: its median step where the link is not slowed; None where that was not measured.
        link_ms: how much longer its step is over the slowed link: the median over the rounds.
        sent_mb: MB (10**6 bytes) that leave each host in a step; 0 on one host.
    """

    figures: Figures
    free_ms: float | None = None
    link_ms: float | None = None
    sent_mb: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Step times of two contenders, divided round by round.

    Args:
        text: what is divided by what.
        rounds: the quotients, one a round.
        limit: what the median is to be at most; None where nothing was promised.
    """

    text: str
    rounds: tuple[float, ...]
    limit: float | None

    @property
    def value(self) -> float:
        """The median over the rounds."""
        return median(self.rounds)

    @property
    def reached(self) -> bool:
        """Whether it is within the limit; so is what has none."""
        return self.limit is None or self.value <= self.limit


def rows_of(contenders: Sequence[Contender], samples: Sequence[Sample], workload: str) -> tuple[Row, ...]:
    """One row a contender, in their order.

    Args:
        contenders: who took part, those with a free link left out.
        samples: of all workloads and contenders.
        workload: which one.
    """
    rows = []
    for figures in figures_of(contenders, samples, workload):
        own = _of(samples, workload, figures.contender.name)
        free = _of(samples, workload, free_name(figures.contender.name))
        slowed, unslowed = _medians(own), _medians(free)
        waits = [slowed[index] - unslowed[index] for index in slowed if index in unslowed]
        rows.append(
            Row(
                figures=figures,
                free_ms=median(step for sample in free for step in sample.step_ms) if free else None,
                link_ms=median(waits) if waits else None,
                sent_mb=median(sample.sent_mb for sample in own),
            )
        )
    return tuple(rows)


def comparisons_of(
    contenders: Sequence[Contender], samples: Sequence[Sample], workload: str, *, limit: float
) -> tuple[Comparison, ...]:
    """Ours over each of DDP's settings that sends as many bytes a number; the limit is for full precision.

    Args:
        contenders: who took part, those with a free link left out.
        samples: of all workloads and contenders.
        workload: which one.
        limit: of the quotients.
    """
    ours = [contender for contender in contenders if contender.role == "ours"]
    others = [contender for contender in contenders if contender.role == "rival"]
    return tuple(
        Comparison(
            text=f"{own.name} / {other.name}",
            rounds=rounds,
            limit=None if is_halved(own) else limit,
        )
        for own in ours
        for other in others
        if is_halved(own) == is_halved(other)
        and (rounds := _quotients(_of(samples, workload, own.name), _of(samples, workload, other.name)))
    )


def _quotients(over: Sequence[Sample], under: Sequence[Sample]) -> tuple[float, ...]:
    ours, theirs = _medians(over), _medians(under)
    return tuple(ours[index] / theirs[index] for index in sorted(ours) if index in theirs)


def _medians(samples: Sequence[Sample]) -> Mapping[int, float]:
    return {sample.round: median(sample.step_ms) for sample in samples}


def _of(samples: Sequence[Sample], workload: str, contender: str) -> list[Sample]:
    return [sample for sample in samples if (sample.workload, sample.contender) == (workload, contender)]
