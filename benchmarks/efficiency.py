"""Parallel efficiency, round by round, with its spread: our replicas against what the hardware gives. Pure.

    alone      one share of the work on one share of the cores, nothing else running
    together   as many of these at once as there are shares, without communication: the ceiling
    ours       as many replicas, the whole work

Shares of one machine share its memory and caches too, so alone / together is what no program can exceed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Sample
from benchmarks.trial import Contender


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """One quotient of step times in each round.

    Args:
        text: what is divided by what.
        rounds: the quotients, one a round.
        promised: whether a target speaks about it.
    """

    text: str
    rounds: tuple[float, ...]
    promised: bool = False

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
