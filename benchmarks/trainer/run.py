"""Runs the benchmark of the Trainer and writes its table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import Figures, figures_of
from benchmarks.harness import Progress, Sample, run_rounds
from benchmarks.lineup import picked, trials_of
from benchmarks.markdown import Conditions
from benchmarks.targets import Target
from benchmarks.trainer.markdown import render_trainer
from benchmarks.trainer.roster import contenders
from benchmarks.trainer.work import REVIEWS
from lockstep.atomic_files import atomic_write

MAX_STEP_RATIO = 0.9
"""Our step time over that of the better setting of the original."""


@dataclass(frozen=True, kw_only=True)
class TrainerResult:
    """What came of it: the figures, and all samples."""

    conditions: Conditions
    figures: tuple[Figures, ...]
    samples: tuple[Sample, ...]

    @property
    def targets(self) -> list[Target]:
        """The target, held against our best."""
        return targets_of(self.figures)

    @property
    def text(self) -> str:
        """The report as Markdown."""
        return render_trainer(self.conditions, REVIEWS.title, self.figures, self.targets)


def targets_of(figures: Sequence[Figures]) -> list[Target]:
    """Our best against the best rival, round by round; nothing where one of them did not run. Pure."""
    ours = [row for row in figures if row.contender.role == "ours"]
    rivals = [row for row in figures if row.contender.role == "rival"]
    if not ours or not rivals:
        return []
    best, rival = (min(rows, key=lambda row: row.ratio) for rows in (ours, rivals))
    text = f"step time, {best.contender.name} / {rival.contender.name}"
    return [Target(text=text, limit=MAX_STEP_RATIO, value=best.ratio / rival.ratio)]


def measure_trainer(conditions: Conditions, progress: Progress, *, only: Sequence[str] | None = None) -> TrainerResult:
    """Measures the contenders in turn.

    Args:
        conditions: how.
        progress: told of each trial's outcome.
        only: names of the contenders that are wanted; None for all.

    Raises:
        ConfigError: a name is nobody's.
        ReplicaError: a contender failed.
    """
    chosen = picked(contenders(conditions.machine.cores), only)
    trials = trials_of(REVIEWS, chosen, conditions)
    rounds = run_rounds(trials, rounds=conditions.rounds, progress=progress)
    return TrainerResult(
        conditions=conditions,
        figures=tuple(figures_of(chosen, rounds.samples, REVIEWS.name)),
        samples=rounds.samples,
    )


def write_trainer_report(folder: Path, result: TrainerResult) -> Path:
    """Writes ``DATE-trainer-cpu-CORES.md`` and ``.json``, each whole or not at all; a run of the same day is replaced.

    Returns:
        The path of the Markdown file.
    """
    record = {
        "conditions": asdict(result.conditions),
        "targets": [{**asdict(target), "reached": target.reached} for target in result.targets],
        "samples": [asdict(sample) for sample in result.samples],
    }
    base = folder / f"{result.conditions.date}-trainer-cpu-{result.conditions.machine.cores}"
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)
