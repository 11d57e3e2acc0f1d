"""The report of ``lockstep bench scaling``: tables for a terminal, JSON, and one HTML page with plots.

``page.html.j2`` beside this file is the page. Everything but ``write_scaling_report`` maps values to text.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep import console
from lockstep.atomic_files import atomic_write
from lockstep.console import text_table
from lockstep.extras import require
from lockstep_tools.scaling.measure import GPU_PROFILED_STEPS, PARTS
from lockstep_tools.scaling.plots import draw_scaling
from lockstep_tools.scaling.runner import Row, ScalingResult

ROW_HEADINGS = (
    "layout", "on", "batch", "s/epoch", "examples/s", "step ms", "p10", "p90", "speed-up", "efficiency", "final loss",
)  # fmt: skip
PART_HEADINGS = ("layout", "step ms", *PARTS)
TEXT_COLUMNS = frozenset({"layout", "on"})
_DEFINITIONS = {
    "1 device": "One replica on one logical device: one share of the cores, or one GPU. The reference.",
    "same total": "N replicas share a global batch of the size that one device has (strong scaling).",
    "N times the total": "N replicas, each with a shard of the size that one device has (weak scaling).",
    "s/epoch": "Seconds of a timed step times the steps of an epoch.",
    "step ms, p10, p90": "Median, 10th and 90th percentile of all timed steps.",
    "speed-up": "Examples/s over those of 1 device in the same round; the median over the rounds.",
    "efficiency": "Speed-up over the hardware in column “on”, in units of 1 device's; 100% is all that it can give.",
    "final loss": "Loss of the last timed step. Rows with the same batch have trained on the same examples, so their"
    " losses differ by dropout masks and batch statistics alone; rows with different batches cannot be compared.",
    "where the time goes": "Means over the replicas and the steps, which add up to the mean step.",
    "exchange": "Summing gradients over the replicas.",
    "update": "Dividing gradients, updating the weights, clearing the gradients.",
    "waiting": "For other replicas: at the update, and for cores that replicas share.",
    "other": "Starting the replicas, synchronizing them, and collecting what they return.",
}
_EXPLAINED_IN_TERMINAL = ("speed-up", "efficiency", "final loss")
_ON_GPUS = (
    f"The parts come from {GPU_PROFILED_STEPS} further steps in which every replica waits for its GPU after each part; "
    "these are slower than the timed ones. Exchange is the time to issue it, and the rest of it is in update."
)


def report_files(folder: Path, *, date: str, recipe: str, devices: str) -> tuple[Path, Path]:
    """The paths of a report's page and samples: ``DATE-scaling-RECIPE-DEVICES`` with two suffixes."""
    base = f"{date}-scaling-{recipe}-{re.sub(r'[^0-9A-Za-z]+', '-', devices)}"
    return folder / f"{base}.html", folder / f"{base}.json"


def write_scaling_report(files: tuple[Path, Path], result: ScalingResult) -> None:
    """Writes the page and the samples atomically, after both have been rendered."""
    # Both are rendered before either is written, so that a failure leaves no page without its samples.
    texts = (render_page(result), json.dumps(_record(result), indent=1, default=str) + "\n")
    for path, text in zip(files, texts, strict=True):
        atomic_write(path, text)


def terminal_tables(result: ScalingResult) -> str:
    """Both tables as plain text, what their columns mean, and warnings."""
    rows = text_table(ROW_HEADINGS, [row_cells(row) for row in result.rows])
    parts = text_table(PART_HEADINGS, [part_cells(row) for row in result.rows])
    where = "where the time of a step goes (ms, mean over the replicas)"
    meanings = "\n".join(console.fill(f"{name}: {_DEFINITIONS[name]}") for name in _EXPLAINED_IN_TERMINAL)
    return "\n\n".join([rows, meanings, where, parts, *map(console.fill, result.machine.warnings)])


def render_page(result: ScalingResult) -> str:
    """The report as one HTML page that loads nothing. Every text in it is escaped. Needs jinja2 and matplotlib."""
    jinja2 = require("jinja2", "plots")
    # test_what_others_wrote_is_text_and_no_markup: names of data and devices come from outside. StrictUndefined makes a
    # misspelt name an error and not an empty cell.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = result.rows
    page: str = environment.from_string((files("lockstep_tools.scaling") / "page.html.j2").read_text("utf-8")).render(
        result=result,
        replicated=[row for row in rows if row.configuration.replicas > 1],
        text_columns=TEXT_COLUMNS,
        row_headings=ROW_HEADINGS,
        row_cells=[row_cells(row) for row in rows],
        part_headings=PART_HEADINGS,
        part_cells=[part_cells(row) for row in rows],
        plots=draw_scaling(rows),
        facts=_facts(result),
        definitions=list(_DEFINITIONS.items()),
        notes=[] if result.hardware.on_cpu else [_ON_GPUS],
    )
    return page


def row_cells(row: Row) -> list[str]:
    """The cells of a row under ``ROW_HEADINGS``."""
    return [
        row.configuration.name,
        row.configuration.resource,
        f"{row.configuration.batch_size}",
        f"{row.epoch_s:.2f}",
        f"{row.examples_per_s:,.1f}",
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.speed_up:.2f}",
        f"{row.efficiency:.0%}",
        f"{row.loss:.4f}",
    ]


def part_cells(row: Row) -> list[str]:
    """The cells of a row under ``PART_HEADINGS``: milliseconds that add up to the step."""
    return [row.configuration.name, *(f"{getattr(row.parts, name):.1f}" for name in ("step", *PARTS))]


def _facts(result: ScalingResult) -> list[tuple[str, str]]:
    """How the run was made, as pairs of a name and a text."""
    settings, names = result.settings, ", ".join(device.name for device in result.hardware.devices)
    return [
        ("date", result.date),
        ("recipe", f"{result.recipe}: {result.title}"),
        ("data", result.source),
        ("devices", f"{names} (--devices {result.devices})"),
        *result.machine.facts,
        ("rounds", f"{settings.rounds}, the configurations in turn, each in a fresh process"),
        ("steps", f"{settings.warm_up} of warm-up, then at most {settings.steps}, timed from the start of an epoch"),
    ]


def _record(result: ScalingResult) -> dict[str, Any]:
    rows = [{**asdict(row), "name": row.configuration.name, "efficiency": row.efficiency} for row in result.rows]
    left_out = ("rows", "hardware")
    return {**{name: value for name, value in asdict(result).items() if name not in left_out}, "rows": rows}
