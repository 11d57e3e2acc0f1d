"""The report of ``lockstep bench scaling``: tables for a terminal, Markdown, JSON, and one HTML page with plots.

``page.html.j2`` beside this file is the page. Everything but ``write_scaling_report`` maps values to text.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.atomic_files import atomic_write
from lockstep.extras import require
from lockstep.report import markdown_table, text_table
from lockstep.scaling.measure import GPU_PROFILED_STEPS, PARTS
from lockstep.scaling.recipes import find_recipe
from lockstep.scaling.runner import Row, ScalingResult

ROW_HEADINGS = (
    "layout", "on", "batch", "steps/epoch", "s/epoch", "timed", "examples/s", "step ms", "p10", "p90", "speed-up",
    "efficiency", "final loss",
)  # fmt: skip
PART_HEADINGS = ("layout", "step ms", *PARTS)
TEXT_COLUMNS = frozenset({"layout", "on", "timed"})

_COLUMNS = {
    "s/epoch": "Seconds an epoch, median over the rounds. Where “timed” names a part of the steps, the epoch is "
    "extrapolated: the seconds a timed step times the steps an epoch. Otherwise whole epochs were timed.",
    "examples/s": "Over the timed steps, including the wait for input. Median over the rounds.",
    "step ms, p10, p90": "From the end of one step to the end of the next: median, 10th and 90th percentile of all "
    "timed steps of all rounds.",
    "final loss": "Loss of the last timed step over its global batch. Rows of the same batch have seen the same "
    "examples as often; larger batches have made fewer updates.",
    "speed-up": "Examples/s over those of 1 device in the same round; the median over the rounds. At the same total it "
    "compares seconds a step (strong scaling), at N times the total seconds an example (weak scaling).",
}
_PARTS = {
    "input": "Waiting for the next global batch, divided and on its devices.",
    "forward": "The module and its loss.",
    "backward": "The gradients of the shard.",
    "exchange": "Summing gradients over the replicas.",
    "update": "Dividing, updating the weights, clearing the gradients.",
    "waiting": "For other replicas: for the slowest one at the update and at its end, and for cores that replicas "
    "share.",
    "other": "Starting the replicas, synchronizing them, and collecting what they return.",
}
_COLORS = ("#8a68b4", "#2b6cb3", "#72aee0", "#de8a26", "#4a9a5c", "#c9504e", "#a7abb1")  # of PARTS
_BLUE, _ORANGE, _GREY = "#3f78b0", "#c9762a", "#80868e"  # legible on light and on dark paper


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """The files of a report."""

    markdown: Path
    json: Path
    page: Path


def report_files(folder: Path, *, date: str, recipe: str, devices: str) -> ReportFiles:
    """The paths of a report: ``DATE-scaling-RECIPE-DEVICES`` with three suffixes."""
    base = f"{date}-scaling-{recipe}-{re.sub(r'[^0-9A-Za-z]+', '-', devices)}"
    return ReportFiles(markdown=folder / f"{base}.md", json=folder / f"{base}.json", page=folder / f"{base}.html")


def write_scaling_report(folder: Path, result: ScalingResult) -> ReportFiles:
    """Writes the three files atomically, after all three have been rendered. Replaces a report of the same day."""
    files = report_files(folder, date=result.date, recipe=result.recipe, devices=result.devices)
    texts = {
        files.json: json.dumps(_record(result), indent=1, default=str) + "\n",
        files.markdown: render_markdown(result),
        files.page: render_page(result),
    }
    for path, text in texts.items():
        atomic_write(path, text)
    return files


def terminal_tables(result: ScalingResult) -> str:
    """Both tables as plain text."""
    rows = text_table(ROW_HEADINGS, [row_cells(row) for row in result.rows])
    parts = text_table(PART_HEADINGS, [part_cells(row) for row in result.rows])
    return f"{rows}\n\nwhere the time of a step goes (ms, mean over the replicas)\n\n{parts}"


def render_markdown(result: ScalingResult) -> str:
    """The report as Markdown."""
    parts = [
        f"# Scaling of {result.recipe}, {result.date}",
        "\n".join([*(f"- {name}: {text}" for name, text in _facts(result)), f"- command: `{result.command}`"]),
        markdown_table(ROW_HEADINGS, [row_cells(row) for row in result.rows]),
        "## Where the time of a step goes",
        "Milliseconds, mean over the replicas.",
        markdown_table(PART_HEADINGS, [part_cells(row) for row in result.rows]),
        "## What the rows and columns mean",
        "\n".join(f"- {name}: {text}" for name, text in _definitions(result)),
    ]
    return "\n\n".join(parts) + "\n"


def render_page(result: ScalingResult) -> str:
    """The report as one HTML page that loads nothing. Every text in it is escaped. Needs jinja2 and matplotlib."""
    jinja2 = require("jinja2", "plots")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = result.rows
    page: str = environment.from_string((files("lockstep.scaling") / "page.html.j2").read_text("utf-8")).render(
        result=result,
        replicated=[row for row in rows if row.configuration.replicas > 1],
        text_columns=TEXT_COLUMNS,
        row_headings=ROW_HEADINGS,
        row_cells=[row_cells(row) for row in rows],
        part_headings=PART_HEADINGS,
        part_cells=[part_cells(row) for row in rows],
        plots=draw_plots(rows),
        extrapolated=any(not row.epochs_timed for row in rows),
        facts=_facts(result),
        definitions=_definitions(result),
    )
    return page


def draw_plots(rows: Sequence[Row]) -> str:
    """Throughput, time an epoch, parts of a step and, from three numbers of replicas on, the speed-up, as one SVG."""
    matplotlib = require("matplotlib", "plots")
    figure_class = require("matplotlib.figure", "plots").Figure
    several = len({row.configuration.replicas for row in rows}) > 2
    # Text stays text, and the identifiers in the file are the same each time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 9}):
        figure = figure_class(figsize=(7.4, 3.4 + 0.75 * len(rows) + 2.6 * several), layout="constrained")
        heights = [*([2.6] if several else []), *[0.25 * len(rows) + 0.8] * 3]
        axes = list(figure.subplots(len(heights), 1, height_ratios=heights))
        if several:
            _plot_speed_up(axes.pop(0), rows)
        ideal = [rows[0].examples_per_s * row.configuration.hardware for row in rows]
        _plot_bars(axes[0], rows, "Examples a second", [row.examples_per_s for row in rows], "{:,.1f}", ideal)
        _plot_bars(axes[1], rows, "Seconds an epoch", [row.epoch_s for row in rows], "{:.2f}")
        _plot_parts(axes[2], rows)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
    drawn = text.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)


def _plot_speed_up(axes: Any, rows: Sequence[Row]) -> None:
    same = [row for row in rows if row.configuration.layout in ("one device", "same total")]
    times = [row for row in rows if row.configuration.layout in ("one device", "N times the total")]
    replicas = [row.configuration.replicas for row in same]
    axes.plot(replicas, [row.configuration.hardware for row in same], "--", color=_GREY, label="hardware")
    axes.plot(replicas, [row.speed_up for row in same], "o-", color=_BLUE, label="same total")
    axes.plot(replicas, [row.speed_up for row in times], "s-", color=_ORANGE, label="N times the total")
    axes.set_ylim(bottom=0)
    axes.set_xticks(replicas)
    axes.set_xlabel("replicas", color=_GREY)
    _style(axes, "Speed-up over 1 device")
    axes.legend(frameon=False, labelcolor=_GREY)


def _plot_bars(
    axes: Any, rows: Sequence[Row], title: str, values: Sequence[float], form: str, ideal: Sequence[float] = ()
) -> None:
    axes.barh([row.configuration.name for row in rows], values, color=_BLUE, height=0.6)
    for place, value in enumerate(ideal):
        axes.plot([value, value], [place - 0.42, place + 0.42], "--", color=_GREY, linewidth=1.2)
    for place, value in enumerate(values):
        end = max([value, *ideal[place : place + 1]])
        axes.annotate(
            form.format(value), (end, place), (4, 0), textcoords="offset points", va="center", color=_GREY,
            annotation_clip=False,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _style(axes, title)


def _plot_parts(axes: Any, rows: Sequence[Row]) -> None:
    names = [row.configuration.name for row in rows]
    left = [0.0] * len(rows)
    for part, color in zip(PARTS, _COLORS, strict=True):
        values = [max(0.0, getattr(row.parts, part)) for row in rows]
        axes.barh(names, values, left=left, color=color, label=part, height=0.6)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    _style(axes, "Parts of the mean step, ms")
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        frameon=False,
        labelcolor=_GREY,
        ncols=len(PARTS),
        loc="outside lower left",
        handlelength=0.8,
        columnspacing=1.2,
    )


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_GREY)
    axes.tick_params(colors=_GREY, length=0)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set_visible(True)
    axes.spines["bottom"].set_color(_GREY)


def row_cells(row: Row) -> list[str]:
    """The cells of a row under ``ROW_HEADINGS``."""
    return [
        row.configuration.name,
        row.configuration.resource,
        f"{row.configuration.batch_size}",
        f"{row.steps_an_epoch}",
        f"{row.epoch_s:.2f}",
        row.timed,
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
    settings, hardware = result.settings, result.hardware
    length = _counted(settings.epochs, "whole epoch") if settings.epochs else f"at most {settings.steps} steps"
    devices = ", ".join(device.name for device in hardware.devices)
    if hardware.on_cpu:
        count, cores = len(hardware.devices), hardware.cores
        shared = f"; {count} of them share {cores} cores" if count * hardware.share > cores else ""
        devices = f"the CPU as {count} logical devices of {_counted(hardware.share, 'core')} each{shared}"
    measured = (
        f"{_counted(settings.rounds, 'round')}, the configurations in turn, each in a fresh process; in each "
        f"{_counted(settings.warm_up, 'step')} of warm-up, then {length}, timed from the start of an epoch"
    )
    return [
        ("date", result.date),
        ("recipe", f"{result.recipe}: {result.title}"),
        ("data", result.source),
        ("devices", f"{devices} (--devices {result.devices})"),
        *result.machine.facts,
        ("measured", measured),
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _definitions(result: ScalingResult) -> list[tuple[str, str]]:
    """What the rows and columns mean, as pairs of a name and a text."""
    on_cpu = result.hardware.on_cpu
    one = (
        "One replica on one logical device with one share of the cores, as one GPU is one of several. The reference."
        if on_cpu
        else f"One replica on {result.hardware.devices[0].name} alone. The reference."
    )
    unit = (
        "the cores in column “on” over those of 1 device, so replicas that share a core are no more hardware"
        if on_cpu
        else "the number of physical GPUs"
    )
    profiled = (
        f" On GPUs they come from {GPU_PROFILED_STEPS} further steps in which every replica waits for its GPU after "
        "forward, backward and update; these are slower than the timed ones. Exchange is the time to issue it, and "
        "the rest of it is in update."
    )
    return [
        ("1 device", one),
        *(
            (row.configuration.name, "One replica with every core of the machine: what can be gained without replicas.")
            for row in result.rows
            if row.configuration.layout == "whole machine"
        ),
        ("same total", "N replicas share a global batch of the size that one device has."),
        ("N times the total", "N replicas, each with a shard of the size that one device has."),
        *_COLUMNS.items(),
        (
            "efficiency",
            f"Speed-up over hardware, in units of 1 device: {unit}. 100% is all that the hardware can give.",
        ),
        (
            "where the time goes",
            "Means over the replicas and all timed steps, which add up to the mean step."
            + ("" if on_cpu else profiled),
        ),
        *_PARTS.items(),
        *(("note", note) for note in find_recipe(result.recipe).notes),
    ]


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
        "rows": [
            {**asdict(row), "name": row.configuration.name, "efficiency": row.efficiency, "timed": row.timed}
            for row in result.rows
        ],
        "samples": [asdict(sample) for sample in result.samples],
    }
