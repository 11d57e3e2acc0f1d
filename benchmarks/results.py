"""What the project set out to reach, held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Literal

from benchmarks.harness import Memory, Sample
from benchmarks.trial import Contender, Role
from lockstep.errors import DataError
from lockstep.scaling.runner import percentile


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender on one workload, over all its rounds."""

    contender: Contender  # who
    median_ms: float  # of all timed steps together
    p10_ms: float  # a tenth of the steps were faster
    p90_ms: float  # a tenth of the steps were slower
    cpu_ms: float  # CPU time of a step, of all threads and processes; median over the rounds
    ratio: float  # to the best rival: the median over the rounds of (its median step / the rival's of the same round)
    # of the step, in exchange and update: the median over the rounds; None where not told apart
    exchange_share: float | None
    first_step_s: float  # median over the rounds
    memory: Memory  # each figure's median over the rounds
    loss: float  # of the last step, median over the rounds
    trained: int  # parameters that the optimizer changes


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


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """One quotient of step times in each round."""

    text: str  # what is divided by what
    rounds: tuple[float, ...]  # the quotients, one a round
    promised: bool = False  # whether a target speaks about it

    @property
    def value(self) -> float:
        """The median over the rounds."""
        return median(self.rounds)


def efficiencies_of(contenders: Sequence[Contender], samples: Sequence[Sample], workload: str) -> list[Efficiency]:
    """Ours against one share alone, the hardware's ceiling, and ours against that; nothing where one was not measured.

    Args:
        contenders: who took part.
        samples: of all workloads.
        workload: which one.
    """
    parts = _parts(contenders)
    if parts is None:
        return []
    alone, together, ours = parts
    steps = {part.name: _medians(samples, workload, part) for part in parts}
    pairs = ((alone, ours, True), (alone, together, False), (together, ours, False))
    return [
        Efficiency(
            text=f"{over.name} / {under.name}",
            rounds=_quotients(steps[over.name], steps[under.name]),
            promised=promised,
        )
        for over, under, promised in pairs
    ]


def _parts(contenders: Sequence[Contender]) -> tuple[Contender, Contender, Contender] | None:
    yardsticks = [contender for contender in contenders if contender.role == "yardstick"]
    alone = next((one for one in yardsticks if one.processes == 1), None)
    together = next((one for one in yardsticks if one.processes == one.shares), None)
    if alone is None or together is None:
        return None
    ours = next((one for one in contenders if one.role == "ours" and one.shares == alone.shares), None)
    return None if ours is None else (alone, together, ours)


def _medians(samples: Sequence[Sample], workload: str, contender: Contender) -> dict[int, float]:
    own = [sample for sample in samples if (sample.workload, sample.contender) == (workload, contender.name)]
    return {sample.round: median(sample.step_ms) for sample in own}


def _quotients(over: Mapping[int, float], under: Mapping[int, float]) -> tuple[float, ...]:
    return tuple(over[index] / under[index] for index in sorted(over) if index in under)


MAX_STEP_RATIO: Mapping[str, float] = MappingProxyType({"mobilenetv2": 0.75, "mlm": 1.0})
"""Our step time over the best rival's."""
MAX_PEER_RATIO: Mapping[str, float] = MappingProxyType({"mobilenetv2": 0.8, "mlm": 1.0})
"""Our step time at 2 replicas over the best peer's at 2."""
MIN_EFFICIENCY = 0.95
"""The step time of one share of the work on one share of the cores, over ours with the shares of all."""
MAX_MEMORY_RATIO = 0.65
"""Our resident memory at 4 replicas over that of DDP's four processes together."""
MAX_FIRST_STEP_RATIO = 1.0
"""Our time from process start to the end of the first step over DDP's at as many processes."""
MAX_EXCHANGE_SHARE: Mapping[str, float] = MappingProxyType({"mobilenetv2": 0.03})
"""Exchange and update over the whole step."""
_MEMORY_SHARES = 4
_PEER_SHARES = 2


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target and what was measured."""

    text: str  # what is compared with what
    limit: float  # what the value is held against
    value: float  # measured
    bound: Literal["at most", "at least"] = "at most"  # on which side of the limit the value is to be

    @property
    def reached(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit if self.bound == "at most" else self.value >= self.limit


def targets_of(workload: str, figures: Sequence[Figures], efficiencies: Sequence[Efficiency] = ()) -> list[Target]:
    """The targets that a workload's figures speak about; without a contender that one needs, it is left out."""
    ours, rivals, peers = (_with_role(figures, role) for role in ("ours", "rival", "peer"))
    ddp = [row for row in rivals if row.contender.processes > 1]
    pairs = [(row, rival) for row in ours if (rival := _ddp_of(ddp, row.contender.shares)) is not None]
    return [
        *(_step_targets("rival", MAX_STEP_RATIO[workload], ours, rivals) if workload in MAX_STEP_RATIO else ()),
        *(_peer_targets(MAX_PEER_RATIO[workload], ours, peers) if workload in MAX_PEER_RATIO else ()),
        *(_efficiency_target(efficiency) for efficiency in efficiencies if efficiency.promised),
        *(_memory_target(row, rival) for row, rival in pairs if row.contender.shares == _MEMORY_SHARES),
        *(_first_step_target(row, rival) for row, rival in pairs),
        *(_exchange_target(workload, row) for row in ours if workload in MAX_EXCHANGE_SHARE),
    ]


def _with_role(figures: Sequence[Figures], role: Role) -> list[Figures]:
    return [row for row in figures if row.contender.role == role]


def _ddp_of(ddp: Sequence[Figures], shares: int) -> Figures | None:
    """DDP's faster setting at that many processes."""
    return min((row for row in ddp if row.contender.shares == shares), key=lambda row: row.median_ms, default=None)


def _step_targets(who: str, limit: float, ours: Sequence[Figures], others: Sequence[Figures]) -> list[Target]:
    """Others as they come, and others told to use channels_last: ours chooses the memory format by itself."""
    if not ours:
        return []
    best = min(ours, key=lambda row: row.ratio)
    told = [row.ratio for row in others if row.contender.layout == "channels_last"]
    untold = [row.ratio for row in others if row.contender.layout != "channels_last"]
    return [
        Target(
            text=f"step time, {best.contender.name} / {name}",
            limit=limit,
            value=best.ratio / min(given),  # both are relative to the same rival of the same rounds
        )
        for name, given in ((f"best {who}", untold), (f"best {who} told to use channels_last", told))
        if given
    ]


def _peer_targets(limit: float, ours: Sequence[Figures], peers: Sequence[Figures]) -> list[Target]:
    two = [[row for row in rows if row.contender.shares == _PEER_SHARES] for rows in (ours, peers)]
    return _step_targets(f"peer at {_PEER_SHARES} replicas", limit, *two)


def _efficiency_target(efficiency: Efficiency) -> Target:
    text = f"parallel efficiency, {efficiency.text}"
    return Target(text=text, limit=MIN_EFFICIENCY, value=efficiency.value, bound="at least")


def _memory_target(row: Figures, rival: Figures) -> Target:
    text = f"peak resident memory, {row.contender.name} / {rival.contender.name}"
    return Target(text=text, limit=MAX_MEMORY_RATIO, value=row.memory.peak_mb / rival.memory.peak_mb)


def _first_step_target(row: Figures, rival: Figures) -> Target:
    text = f"start to first step, {row.contender.name} / {rival.contender.name}"
    return Target(text=text, limit=MAX_FIRST_STEP_RATIO, value=row.first_step_s / rival.first_step_s)


def _exchange_target(workload: str, row: Figures) -> Target:
    text = f"exchange and update / step, {row.contender.name}"
    return Target(text=text, limit=MAX_EXCHANGE_SHARE[workload], value=row.exchange_share or 0.0)
