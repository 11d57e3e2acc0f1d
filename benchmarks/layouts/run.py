"""Measures the layouts in turn and writes the dated table, with JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.layouts.markdown import LayoutsConditions, Row, render_layouts
from benchmarks.layouts.measure import measured
from benchmarks.layouts.roster import LayoutWork, MeasuredLayout, chosen
from lockstep.atomic_files import atomic_write
from lockstep.plan.memory import estimate_memory
from lockstep.plan.shapes import shape_of
from lockstep.plan.software import Software, precision_named
from lockstep.recipes.config_checks import at_least
from lockstep.replicas.cpu.linear import onednn_is_faster

Progress = Callable[[Row], None]
"""Told of each layout when it was measured."""


@dataclass(frozen=True, kw_only=True)
class LayoutsResult:
    """What came of it.

    Args:
        conditions: how it was measured.
        work: what.
        rows: of the table.
    """

    conditions: LayoutsConditions
    work: LayoutWork
    rows: tuple[Row, ...]

    @property
    def text(self) -> str:
        """The report as Markdown."""
        return render_layouts(self.conditions, self.work, self.rows)


def measure_layouts(
    conditions: LayoutsConditions,
    progress: Progress,
    *,
    work: LayoutWork | None = None,
    only: Sequence[str] | None = None,
) -> LayoutsResult:
    """Measures every layout, each in fresh processes.

    Args:
        conditions: how many steps.
        progress: told of each.
        work: the step; None is that of the table.
        only: names of the layouts that are wanted; None for all.

    Raises:
        ConfigError: an unknown name, or no step at all.
        ClusterError: a worker failed.
    """
    at_least("steps", conditions.steps, 1)
    step = work or LayoutWork()
    rows = []
    for layout in chosen(only):
        rows.append(_row(layout, step, conditions.steps))
        progress(rows[-1])
    return LayoutsResult(conditions=conditions, work=step, rows=tuple(rows))


def _row(layout: MeasuredLayout, work: LayoutWork, steps: int) -> Row:
    software = Software(precision=precision_named("fp32"), transposed_head_gradient=onednn_is_faster())
    expected = estimate_memory(shape_of(work.config()), layout.planned(work), software)
    return Row(layout=layout, workers=measured(layout, work, steps), expected=expected)


def write_layouts_report(folder: Path, result: LayoutsResult) -> Path:
    """Writes ``DATE-layouts-cpu-CORES.md`` and ``.json``, each whole or not at all.

    Returns:
        The path of the Markdown file.
    """
    base = folder / f"{result.conditions.date}-layouts-cpu-{result.conditions.machine.cores}"
    record = {"conditions": asdict(result.conditions), "work": asdict(result.work)}
    record["rows"] = [  # type: ignore[assignment]
        {
            "layout": row.layout.name,
            "workers": [asdict(worker) for worker in row.workers],
            "expected": asdict(row.expected),
            "ratio": row.ratio,
        }
        for row in result.rows
    ]
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)
