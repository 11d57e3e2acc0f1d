"""Measures the choices in turn and writes the dated table, with JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.markdown import Conditions
from benchmarks.memory_choices.markdown import Row, render_choices, rows_of
from benchmarks.memory_choices.measure import Measured, MemoryTrial, measured
from benchmarks.memory_choices.roster import Choice, ReviewsWork, chosen, why_not
from lockstep.atomic_files import atomic_write
from lockstep.recipes.config_checks import at_least

Progress = Callable[[str, Measured | str], None]
"""Told of a choice's name and what it took, or why it was not measured."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """What came of it.

    Args:
        conditions: how it was measured.
        work: what.
        rows: of the table.
    """

    conditions: Conditions
    work: ReviewsWork
    rows: tuple[Row, ...]

    @property
    def text(self) -> str:
        """The report as Markdown."""
        return render_choices(self.conditions, self.work, self.rows)


def measure_choices(
    conditions: Conditions, progress: Progress, *, work: ReviewsWork | None = None, only: Sequence[str] | None = None
) -> MemoryResult:
    """Measures every choice once a round, each time in a fresh process.

    Args:
        conditions: how many steps and rounds.
        progress: told of each.
        work: the step; None is that of BERT-base.
        only: names of the choices that are wanted; None for all.

    Raises:
        ConfigError: an unknown name, or no round or step at all.
        ReplicaError: a choice failed.
    """
    at_least("rounds", conditions.rounds, 1)
    step, wanted = work or ReviewsWork(), chosen(only)
    reasons = {choice.name: why_not(choice, _CPU) for choice in wanted}
    for name, reason in reasons.items():
        if reason:
            progress(name, reason)
    present = [choice for choice in wanted if not reasons[choice.name]]
    rounds = [_round(present, step, conditions, progress) for _ in range(conditions.rounds)]
    return MemoryResult(conditions=conditions, work=step, rows=tuple(rows_of(wanted, rounds, reasons)))


def _round(
    present: Sequence[Choice], work: ReviewsWork, conditions: Conditions, progress: Progress
) -> dict[str, Measured]:
    found = {}
    for choice in present:
        trial = MemoryTrial(choice=choice, work=work, warm_up=conditions.warm_up, steps=conditions.steps)
        found[choice.name] = measured(trial)
        progress(choice.name, found[choice.name])
    return found


def write_memory_report(folder: Path, result: MemoryResult) -> Path:
    """Writes ``DATE-memory-cpu-CORES.md`` and ``.json``, each whole or not at all.

    Returns:
        The path of the Markdown file.
    """
    base = folder / f"{result.conditions.date}-memory-cpu-{result.conditions.machine.cores}"
    record = {"conditions": asdict(result.conditions), "work": asdict(result.work)}
    record["rows"] = [asdict(row) for row in result.rows]  # type: ignore[assignment]
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)
