"""What the project set out to reach, held against the figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from benchmarks.efficiency import Efficiency
from benchmarks.figures import Figures
from benchmarks.trial import Role

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
    """One target and what was measured.

    Args:
        text: what is compared with what.
        limit: what the value is held against.
        value: measured.
        bound: on which side of the limit the value is to be.
    """

    text: str
    limit: float
    value: float
    bound: Literal["at most", "at least"] = "at most"

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
