"""From samples to figures: medians, spread, ratios of contenders round by round. Pure functions on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Sample
from benchmarks.memory import Memory
from benchmarks.trial import Contender
from lockstep.errors import DataError
from lockstep.scaling.runner import percentile


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender on one workload, over all its rounds.

    Args:
        contender: who.
        median_ms: of all timed steps together.
        p10_ms: a tenth of the steps were faster.
        p90_ms: a tenth of the steps were slower.
        cpu_ms: CPU time of a step, of all threads and processes; median over the rounds.
        ratio: to the best rival: the median over the rounds of (its median step / the rival's of the same round).
        exchange_share: of the step, in exchange and update: the median over the rounds; None where not told apart.
        first_step_s: median over the rounds.
        memory: each figure's median over the rounds.
        loss: of the last step, median over the rounds.
        trained: parameters that the optimizer changes.
    """

    contender: Contender
    median_ms: float
    p10_ms: float
    p90_ms: float
    cpu_ms: float
    ratio: float
    exchange_share: float | None
    first_step_s: float
    memory: Memory
    loss: float
    trained: int


def paired_ratio(samples: Sequence[Sample], others: Sequence[Sample]) -> float:
    """The median over the rounds of (median step of ours / median step of theirs in the same round).

    Raises:
        DataError: the two have no round in common.
    """
    theirs = {sample.round: median(sample.step_ms) for sample in others}
    ratios = [median(sample.step_ms) / theirs[sample.round] for sample in samples if sample.round in theirs]
    if not ratios:
        raise DataError("two contenders without a common round were to be compared; run them in the same rounds")
    return median(ratios)


def best_rival(contenders: Sequence[Contender], samples: Sequence[Sample], workload: str) -> Contender | None:
    """The rival with the lowest median step; without rivals the best peer, and None without any."""
    for role in ("rival", "peer"):
        others = [contender for contender in contenders if contender.role == role]
        if others:
            return min(others, key=lambda other: median(_steps(_of(samples, workload, other))))
    return None


def figures_of(contenders: Sequence[Contender], samples: Sequence[Sample], workload: str) -> list[Figures]:
    """The figures of each contender of a workload, in their order.

    Args:
        contenders: who took part.
        samples: of all workloads.
        workload: which one.
    """
    if not contenders:
        return []
    best = best_rival(contenders, samples, workload) or contenders[0]
    reference = _of(samples, workload, best)
    return [_figures(contender, _of(samples, workload, contender), reference) for contender in contenders]


def _figures(contender: Contender, own: Sequence[Sample], reference: Sequence[Sample]) -> Figures:
    steps = _steps(own)
    return Figures(
        contender=contender,
        median_ms=median(steps),
        p10_ms=percentile(steps, 10),
        p90_ms=percentile(steps, 90),
        cpu_ms=median(sample.cpu_ms for sample in own),
        ratio=paired_ratio(own, reference),
        exchange_share=_exchange_share(own),
        first_step_s=median(sample.first_step_s for sample in own),
        memory=Memory(
            peak_mb=median(sample.memory.peak_mb for sample in own),
            rss_mb=median(sample.memory.rss_mb for sample in own),
            pss_mb=median(sample.memory.pss_mb for sample in own),
        ),
        loss=median(sample.loss for sample in own),
        trained=own[0].trained,
    )


def _exchange_share(own: Sequence[Sample]) -> float | None:
    shares = [median(sample.exchange_ms) / median(sample.step_ms) for sample in own if sample.exchange_ms]
    return median(shares) if shares else None


def _of(samples: Sequence[Sample], workload: str, contender: Contender) -> list[Sample]:
    own = [sample for sample in samples if (sample.workload, sample.contender) == (workload, contender.name)]
    if not own:
        raise DataError(f"contender {contender.name!r} has no sample of workload {workload!r}; run it first")
    return own


def _steps(samples: Sequence[Sample]) -> list[float]:
    return [step for sample in samples for step in sample.step_ms]
