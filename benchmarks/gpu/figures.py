"""From samples to rows of the GPU's table, and what is held against what. Pure functions on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures import paired_ratio
from benchmarks.gpu.floors import Floor
from benchmarks.gpu.roster import COMPILED, DDP, EAGER, FOUR, ONE, ONE_COMPILED
from benchmarks.harness import Absence, Sample
from benchmarks.trial import Contender, Workload

MAX_EAGER_RATIO = 1.0
"""One replica's step over that of the best eager loop."""
MAX_BEST_RATIO = 0.7
"""One replica's step of bert_tiny over that of the best hand-written loop, torch.compile's included."""
MAX_FOUR_RATIO = 1.15
"""The step of four logical devices over that of the undivided GPU, on the same global batch."""
MAX_DDP_RATIO = 0.2
"""The step of four logical devices over that of four DDP processes on the same GPU."""
MAX_FOUR_MS = 20.0
"""bert_tiny's step on four logical devices; the published run took 240 ms on an RTX 4090."""
MAX_PEER_RATIO = 1.0
"""One replica's step over a peer's; it is to be below."""
_TINY = "mlm"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one workload, over all its rounds.

    Args:
        contender: who.
        median_ms: a step's, of all timed laps.
        low_ms: of the fastest lap.
        high_ms: of the slowest lap.
        over_best: to the best hand-written loop, round by round; None without one.
        over_floor: to the floor; None without one.
        ready_s: from the start of the processes to the end of the warm-up; median over the rounds.
        reserved_mb: what torch's allocators have taken of the GPU by the last step, of all processes; the highest.
        used_mb: what all processes had of it inside the last step, without what others had before; the highest.
        loss: mean over all steps, median over the rounds.
        trained: parameters that the optimizer changes.
        rounds: how many.
        notes: what it said of itself.
    """

    contender: Contender
    median_ms: float
    low_ms: float
    high_ms: float
    over_best: float | None
    over_floor: float | None
    ready_s: float
    reserved_mb: float
    used_mb: float
    loss: float
    trained: int
    rounds: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One target and what was measured.

    Args:
        text: what is compared with what.
        limit: what the value is to be at most; below it, where ``below``.
        value: measured; None where something that it needs did not run.
        below: whether the limit itself is too much.
        unit: of limit and value; empty for a ratio.
    """

    text: str
    limit: float
    value: float | None
    below: bool = False
    unit: str = ""

    @property
    def verdict(self) -> str:
        """``yes``, ``NO`` or ``not measured``."""
        if self.value is None:
            return "not measured"
        return "yes" if self.value < self.limit or (self.value == self.limit and not self.below) else "NO"


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """A workload and what its contenders did.

    Args:
        workload: the work.
        rows: one a contender that ran.
        absences: who did not.
        floor: of a step; None where the device's rates are not known.
        targets: with what was measured.
    """

    workload: Workload
    rows: tuple[Row, ...]
    absences: tuple[Absence, ...]
    floor: Floor | None
    targets: tuple[GpuTarget, ...]


def result_of(
    workload: Workload,
    contenders: Sequence[Contender],
    samples: Sequence[Sample],
    *,
    absences: Sequence[Absence] = (),
    floor: Floor | None = None,
    used_before_mb: float = 0.0,
) -> GpuResult:
    """What came of a workload.

    Args:
        workload: which one.
        contenders: all that were asked for, in their order.
        samples: of all workloads, times a step's.
        absences: of all workloads.
        floor: of its step.
        used_before_mb: what others had of the device's memory before the run.
    """
    own = _by_contender(contenders, [sample for sample in samples if sample.workload == workload.name])
    best = _fastest(own, _rivals(contenders))
    rows = tuple(
        _row(contender, own[contender.name], best, floor, used_before_mb)
        for contender in contenders
        if contender.name in own
    )
    return GpuResult(
        workload=workload,
        rows=rows,
        absences=tuple(absence for absence in absences if absence.workload == workload.name),
        floor=floor,
        targets=targets_of(workload, contenders, own),
    )


def targets_of(
    workload: Workload, contenders: Sequence[Contender], own: dict[str, list[Sample]]
) -> tuple[GpuTarget, ...]:
    """The targets of a workload.

    Args:
        workload: which one.
        contenders: all that were asked for.
        own: the samples of those that ran, by name.
    """
    eager = _fastest(own, [name for name in _rivals(contenders) if name.startswith(EAGER)])
    compiled = _fastest(own, [name for name in _rivals(contenders) if name.startswith(COMPILED)])
    one, four, ddp = own.get(ONE), own.get(FOUR), own.get(DDP)
    best_one = _fastest(own, (ONE, ONE_COMPILED))
    tiny = workload.name.partition("-")[0] == _TINY
    others = [contender.name for contender in contenders if contender.role == "peer"]
    best = _fastest(own, _rivals(contenders)) if compiled is not None else None  # eager alone is not "the best" loop
    return (
        _ratio(f"{ONE} / best eager loop", MAX_EAGER_RATIO, one, eager),
        *([_ratio(f"{ONE} or {ONE_COMPILED} / best loop", MAX_BEST_RATIO, best_one, best)] if tiny else []),
        _ratio(f"{FOUR} / {ONE}, the same global batch", MAX_FOUR_RATIO, four, one),
        _ratio(f"{FOUR} / {DDP}", MAX_DDP_RATIO, four, ddp),
        *([_step_limit(f"{FOUR}, a step", four)] if tiny else []),
        *(_ratio(f"{ONE} / {name}", MAX_PEER_RATIO, one, own.get(name), below=True) for name in others),
    )


def _ratio(
    text: str, limit: float, ours: list[Sample] | None, theirs: list[Sample] | None, *, below: bool = False
) -> GpuTarget:
    value = None if ours is None or theirs is None else paired_ratio(ours, theirs)
    return GpuTarget(text=text, limit=limit, value=value, below=below)


def _step_limit(text: str, samples: list[Sample] | None) -> GpuTarget:
    value = None if samples is None else median(_steps(samples))
    return GpuTarget(text=text, limit=MAX_FOUR_MS, value=value, below=True, unit=" ms")


def _row(
    contender: Contender, own: list[Sample], best: list[Sample] | None, floor: Floor | None, used_before_mb: float
) -> Row:
    steps = _steps(own)
    return Row(
        contender=contender,
        median_ms=median(steps),
        low_ms=min(steps),
        high_ms=max(steps),
        over_best=None if best is None else paired_ratio(own, best),
        over_floor=None if floor is None else median(steps) / floor.ms,
        ready_s=median(sample.first_step_s for sample in own),
        reserved_mb=max(sample.device_reserved_mb for sample in own),
        used_mb=max(0.0, max(sample.device_used_mb for sample in own) - used_before_mb),
        loss=median(sample.loss for sample in own),
        trained=own[0].trained,
        rounds=len(own),
        notes=tuple(dict.fromkeys(note for sample in own for note in sample.notes)),
    )


def _by_contender(contenders: Sequence[Contender], samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each contender that has any."""
    found = {one.name: [sample for sample in samples if sample.contender == one.name] for one in contenders}
    return {name: own for name, own in found.items() if own}


def _rivals(contenders: Sequence[Contender]) -> list[str]:
    """The names of the hand-written loops of one process."""
    return [one.name for one in contenders if one.role == "rival" and one.processes == 1]


def _fastest(own: dict[str, list[Sample]], names: Sequence[str]) -> list[Sample] | None:
    there = [own[name] for name in names if name in own]
    return min(there, key=lambda samples: median(_steps(samples)), default=None)


def _steps(samples: Sequence[Sample]) -> list[float]:
    return [step for sample in samples for step in sample.step_ms]
