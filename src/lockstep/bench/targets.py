"""What the project set out to reach, held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.bench.figures import Figures
from lockstep.bench.trial import Layout

MAX_STEP_RATIO: Mapping[str, float] = MappingProxyType({"mobilenetv2": 0.75, "mlm": 1.0})
"""Our step time over the best rival's."""
MAX_MEMORY_RATIO = 0.65
"""Our resident memory at 4 replicas over that of DDP's four processes together."""
MAX_FIRST_STEP_RATIO = 1.0
"""Our time from process start to the end of the first step over DDP's at as many processes."""
MAX_EXCHANGE_SHARE: Mapping[str, float] = MappingProxyType({"mobilenetv2": 0.03})
"""Exchange and update over the whole step."""
_MEMORY_SHARES = 4
_RIVALS: Mapping[Layout, str] = MappingProxyType(
    {"contiguous": "best rival", "channels_last": "best rival told to use channels_last"}
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target and what was measured.

    Args:
        text: what is compared with what.
        limit: at most this.
        value: measured.
    """

    text: str
    limit: float
    value: float

    @property
    def reached(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit


def targets_of(workload: str, figures: Sequence[Figures]) -> list[Target]:
    """The targets that a workload's figures speak about; without a contender that one needs, it is left out."""
    ours = [row for row in figures if row.contender.ours and row.contender.counted]
    rivals = [row for row in figures if row.contender.counted and not row.contender.ours]
    ddp = [row for row in rivals if row.contender.processes > 1]
    pairs = [(row, rival) for row in ours if (rival := _ddp_of(ddp, row.contender.shares)) is not None]
    return [
        *(_step_targets(workload, ours, rivals) if workload in MAX_STEP_RATIO and ours else ()),
        *(_memory_target(row, rival) for row, rival in pairs if row.contender.shares == _MEMORY_SHARES),
        *(_first_step_target(row, rival) for row, rival in pairs),
        *(_exchange_target(workload, row) for row in ours if workload in MAX_EXCHANGE_SHARE),
    ]


def _ddp_of(ddp: Sequence[Figures], shares: int) -> Figures | None:
    """DDP's faster setting at that many processes."""
    return min((row for row in ddp if row.contender.shares == shares), key=lambda row: row.median_ms, default=None)


def _step_targets(workload: str, ours: Sequence[Figures], rivals: Sequence[Figures]) -> list[Target]:
    """One target per memory format of the rivals: ours chooses it by itself, they have to be told."""
    best = min(ours, key=lambda row: row.ratio)
    ratios = {layout: [row.ratio for row in rivals if row.contender.layout == layout] for layout in _RIVALS}
    return [
        Target(
            text=f"step time, {best.contender.name} / {_RIVALS[layout]}",
            limit=MAX_STEP_RATIO[workload],
            value=best.ratio / min(given),  # both are relative to the same rival of the same rounds
        )
        for layout, given in ratios.items()
        if given
    ]


def _memory_target(row: Figures, rival: Figures) -> Target:
    text = f"peak resident memory, {row.contender.name} / {rival.contender.name}"
    return Target(text=text, limit=MAX_MEMORY_RATIO, value=row.memory.peak_mb / rival.memory.peak_mb)


def _first_step_target(row: Figures, rival: Figures) -> Target:
    text = f"start to first step, {row.contender.name} / {rival.contender.name}"
    return Target(text=text, limit=MAX_FIRST_STEP_RATIO, value=row.first_step_s / rival.first_step_s)


def _exchange_target(workload: str, row: Figures) -> Target:
    text = f"exchange and update / step, {row.contender.name}"
    return Target(text=text, limit=MAX_EXCHANGE_SHARE[workload], value=row.exchange_share or 0.0)
