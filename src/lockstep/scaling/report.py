"""Writes a scaling run's report: Markdown, JSON with every sample, and one HTML page that needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.whole_file import write_whole
from lockstep.scaling.figures import Row
from lockstep.scaling.markdown import render_markdown
from lockstep.scaling.page import render_page
from lockstep.scaling.run import ScalingResult


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """The files of a report."""

    markdown: Path
    json: Path
    page: Path


def report_files(folder: Path, *, date: str, recipe: str, devices: str) -> ReportFiles:
    """Where a report goes: ``DATE-scaling-RECIPE-DEVICES`` with three suffixes."""
    base = f"{date}-scaling-{recipe}-{re.sub(r'[^0-9A-Za-z]+', '-', devices)}"
    return ReportFiles(markdown=folder / f"{base}.md", json=folder / f"{base}.json", page=folder / f"{base}.html")


def write_scaling_report(folder: Path, result: ScalingResult) -> ReportFiles:
    """Writes the three files, each whole or not at all; a run of the same day and devices is replaced.

    Nothing is written before all three have been made.
    """
    files = report_files(folder, date=result.date, recipe=result.recipe, devices=result.devices)
    texts = {
        files.json: json.dumps(_record(result), indent=1, default=str) + "\n",
        files.markdown: render_markdown(result),
        files.page: render_page(result),
    }
    for path, text in texts.items():
        write_whole(path, text)
    return files


def _record(result: ScalingResult) -> dict[str, Any]:
    return {
        "recipe": result.recipe,
        "title": result.title,
        "source": result.source,
        "config": asdict(result.config),
        "settings": asdict(result.settings),
        "devices": result.devices,
        "date": result.date,
        "machine": asdict(result.machine),
        "command": result.command,
        "rows": [_row(row) for row in result.rows],
        "samples": [asdict(sample) for sample in result.samples],
    }


def _row(row: Row) -> dict[str, Any]:
    return {**asdict(row), "name": row.configuration.name, "efficiency": row.efficiency, "timed": row.timed}
