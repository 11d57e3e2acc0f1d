"""Measures the choices in turn and writes the dated table, with JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cpu_choices.roster import choices
from benchmarks.figures import Figures, figures_of
from benchmarks.harness import Progress, Sample, run_rounds
from benchmarks.lineup import picked, trials_of
from benchmarks.markdown import Conditions, head, settings_list
from benchmarks.trial import Workload
from benchmarks.workloads import find_workload
from lockstep.atomic_files import atomic_write
from lockstep.report import markdown_table

_HEADINGS = ("choice", "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "peak MB", "loss")
_LEGEND = """\
- ratio: to the first row: the median step over that one's of the same round, and of these the median.
- CPU ms: CPU time of a step, of all threads together. exchange + update: as part of the step, from the arrival of the
  last replica at `optimizer.step`.
- loss: of the last step; the batches and the first weights are the same for all."""


@dataclass(frozen=True, kw_only=True)
class ChoicesResult:
    """What came of it: the figures of each workload, and all samples."""

    conditions: Conditions
    figures: tuple[tuple[Workload, tuple[Figures, ...]], ...]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """The report as Markdown."""
        blocks = [head(self.conditions, "Choices of replicas on a CPU")]
        for workload, figures in self.figures:
            blocks += [f"## {workload.title}", markdown_table(_HEADINGS, [_row(row) for row in figures])]
        return "\n\n".join([*blocks, "\n".join(settings_list(self.figures[0][1])), _LEGEND]) + "\n"


def measure_cpu_choices(
    names: Sequence[str], conditions: Conditions, progress: Progress, *, only: Sequence[str] | None = None
) -> ChoicesResult:
    """Measures every choice once a round, each time in a fresh process.

    Args:
        names: of the workloads.
        conditions: how many steps and rounds.
        progress: told of each trial's outcome.
        only: names of the choices that are wanted; None for all.

    Raises:
        ConfigError: a name is nobody's.
        ReplicaError: a contender failed.
    """
    workloads, chosen = [find_workload(name) for name in names], picked(choices(), only)
    trials = [trial for workload in workloads for trial in trials_of(workload, chosen, conditions)]
    samples = run_rounds(trials, rounds=conditions.rounds, progress=progress).samples
    figures = tuple((workload, tuple(figures_of(chosen, samples, workload.name))) for workload in workloads)
    return ChoicesResult(conditions=conditions, figures=figures, samples=samples)


def write_choices_report(folder: Path, result: ChoicesResult) -> Path:
    """Writes ``DATE-choices-cpu-CORES.md`` and ``.json``, each whole or not at all; one of the same day is replaced.

    Returns:
        The path of the Markdown file.
    """
    record = {"conditions": asdict(result.conditions), "samples": [asdict(sample) for sample in result.samples]}
    base = folder / f"{result.conditions.date}-choices-cpu-{result.conditions.machine.cores}"
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)


def _row(row: Figures) -> list[str]:
    return [
        row.contender.name,
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.ratio:.3f}",
        f"{row.cpu_ms:.0f}",
        "" if row.exchange_share is None else f"{row.exchange_share:.1%}",
        f"{row.memory.peak_mb:.0f}",
        f"{row.loss:.4f}",
    ]
