"""Writes a scaling run's report: Markdown, JSON with every sample, and one HTML page that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.atomic_files import atomic_write
from lockstep.extras import require
from lockstep.report import text_table
from lockstep.scaling.measure import GPU_PROFILED_STEPS, PARTS
from lockstep.scaling.recipes import find_recipe
from lockstep.scaling.runner import Row, ScalingResult

ROW_HEADINGS = (
    "layout", "on", "batch", "steps/epoch", "s/epoch", "timed", "examples/s", "step ms", "p10", "p90", "speed-up",
    "efficiency", "final loss",
)  # fmt: skip
PART_HEADINGS = ("layout", "step ms", *PARTS)
TEXT_COLUMNS = frozenset({"layout", "on", "timed", "data"})
"""Columns of words; the others are numbers."""


def row_cells(row: Row) -> list[str]:
    """A row under ``ROW_HEADINGS``."""
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
    """A row under ``PART_HEADINGS``: milliseconds, which add up to the step's."""
    return [row.configuration.name, *(f"{getattr(row.parts, name):.1f}" for name in ("step", *PARTS))]


def facts(result: ScalingResult) -> list[tuple[str, str]]:
    """How the run was made: pairs of a name and what is to be said."""
    machine = result.machine
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    return [
        ("date", result.date),
        ("recipe", f"{result.recipe}: {result.title}"),
        ("data", result.source),
        ("devices", _devices(result)),
        ("machine", f"{where}; load average before the run {machine.load:.2f}"),
        ("versions", f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}"),
        ("commit", machine.commit),
        ("measured", _measured(result)),
    ]


def definitions(result: ScalingResult) -> list[tuple[str, str]]:
    """What the rows and columns mean: pairs of a name and its definition."""
    return [
        *_layouts(result),
        *_COLUMN_WORDS.items(),
        ("efficiency", _efficiency(result)),
        *_parts(result),
        *(("note", note) for note in find_recipe(result.recipe).notes),
    ]


def is_extrapolated(rows: Sequence[Row]) -> bool:
    """Whether the seconds an epoch of some row are not those of a whole one."""
    return any(not row.epochs_timed for row in rows)


def _measured(result: ScalingResult) -> str:
    settings = result.settings
    timed = (
        _counted(settings.epochs, "whole epoch") if settings.epochs else f"at most {_counted(settings.steps, 'step')}"
    )
    turns = "the configurations in turn, each in a fresh process"
    warm = f"{_counted(settings.warm_up, 'step')} of warm-up"
    return (
        f"{_counted(settings.rounds, 'round')}, {turns}; in each {warm}, then {timed}, timed from the start of an epoch"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _devices(result: ScalingResult) -> str:
    hardware = result.hardware
    count, cores = len(hardware.devices), hardware.cores
    if not hardware.on_cpu:
        return f"{', '.join(device.name for device in hardware.devices)} (--devices {result.devices})"
    each = _counted(hardware.share, "core")
    shared = f"; {count} of them share {cores} cores" if count * hardware.share > cores else ""
    return f"the CPU as {count} logical devices of {each} each{shared} (--devices {result.devices})"


def _layouts(result: ScalingResult) -> list[tuple[str, str]]:
    one = (
        "One replica on one logical device, with one share of the cores, as one GPU is one of several. The reference."
        if result.hardware.on_cpu
        else f"One replica on {result.hardware.devices[0].name} alone. The reference."
    )
    whole = [row for row in result.rows if row.configuration.layout == "whole machine"]
    more = [
        (row.configuration.name, "One replica with every core of the machine: what there is to gain without replicas.")
        for row in whole
    ]
    return [
        ("1 device", one),
        *more,
        ("same total", "N replicas share a global batch of the size that one device has."),
        ("N times the total", "N replicas, each with a shard of the size that one device has."),
    ]


def _efficiency(result: ScalingResult) -> str:
    text = "Speed-up over hardware, counted in that of 1 device: "
    if result.hardware.on_cpu:
        text += "the cores in column “on” over those of 1 device, so replicas that share a core are no more hardware"
    else:
        text += "the number of physical GPUs"
    return f"{text}. 100% is all that the hardware can give."


def _parts(result: ScalingResult) -> list[tuple[str, str]]:
    how = "Means over the replicas and all timed steps, which add up to the mean step. "
    if not result.hardware.on_cpu:
        how += (
            f"On GPUs they come from {GPU_PROFILED_STEPS} further steps in which every replica waits for its GPU after "
            "forward, backward and update; these are slower than the timed ones. Exchange is the time to issue it, and "
            "the rest of it is in update. "
        )
    return [("where the time goes", how.strip()), *_PART_WORDS.items()]


_COLUMN_WORDS: Mapping[str, str] = {
    "s/epoch": "Seconds an epoch. Where “timed” names a part of the steps, the epoch is extrapolated: the seconds a "
    "timed step times the steps an epoch; else whole epochs were timed. Median over the rounds.",
    "examples/s": "Over the timed steps, waiting for the input included. Median over the rounds.",
    "step ms, p10, p90": "From the end of a step to the end of the next: the median of all timed steps of all rounds, "
    "and what a tenth of them were faster and slower than.",
    "final loss": "Of the last timed step, over its global batch. Rows of the same batch have seen the same examples "
    "as often; larger batches have made fewer updates.",
    "speed-up": "Examples/s over those of 1 device in the same round; the median over the rounds. At the same total it "
    "compares seconds a step (strong scaling), at N times the total seconds an example (weak scaling).",
}
_PART_WORDS: Mapping[str, str] = {
    "input": "Waiting for the next global batch, divided and on its devices.",
    "forward": "The module and its loss.",
    "backward": "The gradients of the shard.",
    "exchange": "Summing gradients over the replicas.",
    "update": "Dividing, updating the weights, clearing the gradients.",
    "waiting": "For other replicas: for the slowest at the update, for its end, and for a turn where replicas share "
    "cores.",
    "other": "Starting the replicas, their meetings, and collecting what they return.",
}


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One data set's seconds an epoch, and what follows from them.

    Args:
        data: its name.
        one_s: one GPU, batch 64.
        same_s: four GPUs, 64 in all.
        times_s: four GPUs, 256 in all.
    """

    data: str
    one_s: float
    same_s: float
    times_s: float

    @property
    def same_speed_up(self) -> float:
        """Of four GPUs at the same total."""
        return self.one_s / self.same_s

    @property
    def times_speed_up(self) -> float:
        """Of four GPUs at four times the total."""
        return self.one_s / self.times_s


PUBLISHED_TITLE = "Published, on another machine"
PUBLISHED_NOTE = (
    "Seconds an epoch that a tutorial on tf.distribute printed for MobileNetV2 at 224x224 on 4 x GTX 1080 Ti. Another "
    "machine, another library, other data: not measured here and not to be compared with the times above."
)
PUBLISHED = {
    "images": (
        PublishedRow(data="cats_vs_dogs", one_s=146, same_s=39, times_s=29),
        PublishedRow(data="tf_flowers", one_s=22, same_s=7, times_s=5),
    )
}
PUBLISHED_HEADINGS = (
    "data",
    "1 GPU, batch 64",
    "4 GPUs, total 64",
    "4 GPUs, total 256",
    "speed-up, total 64",
    "speed-up, total 256",
)


def published_cells(row: PublishedRow) -> list[str]:
    """A row of the table; the two speed-ups are those of the two columns before them."""
    seconds = (f"{value:.0f}" for value in (row.one_s, row.same_s, row.times_s))
    return [row.data, *seconds, f"{row.same_speed_up:.2f}", f"{row.times_speed_up:.2f}"]


def render_markdown(result: ScalingResult) -> str:
    """The whole report."""
    parts = [
        f"# Scaling of {result.recipe}, {result.date}",
        "\n".join([*(f"- {name}: {said}" for name, said in facts(result)), f"- command: `{result.command}`"]),
        _table(ROW_HEADINGS, [row_cells(row) for row in result.rows]),
        "## Where the time of a step goes",
        "Milliseconds, mean over the replicas.",
        _table(PART_HEADINGS, [part_cells(row) for row in result.rows]),
        "## What the rows and columns mean",
        "\n".join(f"- {name}: {said}" for name, said in definitions(result)),
        *_published(result.recipe),
    ]
    return "\n\n".join(parts) + "\n"


def terminal_tables(result: ScalingResult) -> str:
    """The two tables, for a person who waited for them."""
    rows = text_table(ROW_HEADINGS, [row_cells(row) for row in result.rows])
    parts = text_table(PART_HEADINGS, [part_cells(row) for row in result.rows])
    return f"{rows}\n\nwhere the time of a step goes (ms, mean over the replicas)\n\n{parts}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words to the left, numbers to the right."""
    rule = ["---" if heading in TEXT_COLUMNS else "---:" for heading in headings]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def _published(recipe: str) -> list[str]:
    rows = PUBLISHED.get(recipe, ())
    if not rows:
        return []
    table = _table(PUBLISHED_HEADINGS, [published_cells(row) for row in rows])
    return [f"## {PUBLISHED_TITLE}", PUBLISHED_NOTE, table]


WIDTH, HEIGHT = 480.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 12.0, 12.0, 40.0
_MOST_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar with what is written beside it.

    Args:
        label: whose it is.
        value: written at its end.
        percent: its length.
        ideal_percent: where perfect scaling would end it, or None.
    """

    label: str
    value: str
    percent: float
    ideal_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a stacked bar: which, its milliseconds, its length, and its part of the step."""

    part: str
    ms: float
    percent: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stacked bar: one step."""

    label: str
    value: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of the speed-up plot: a name, a class for its looks, and points (x, y, words) in drawing units."""

    name: str
    kind: str
    points: tuple[tuple[float, float, str], ...]

    @property
    def path(self) -> str:
        """For a polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in self.points)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The speed-up over the replicas: ticks are pairs of a place and a number."""

    curves: tuple[Curve, ...]
    x_ticks: tuple[tuple[float, int], ...]
    y_ticks: tuple[tuple[float, int], ...]
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def throughput_bars(rows: Sequence[Row]) -> list[Bar]:
    """Examples/s, with a mark at what the first row's would be on as much hardware."""
    ideals = [rows[0].examples_per_s * row.configuration.hardware for row in rows]
    longest = max(*ideals, *(row.examples_per_s for row in rows))
    return [
        Bar(
            label=row.configuration.name,
            value=f"{row.examples_per_s:,.1f}",
            percent=100 * row.examples_per_s / longest,
            ideal_percent=100 * ideal / longest,
        )
        for row, ideal in zip(rows, ideals, strict=True)
    ]


def epoch_bars(rows: Sequence[Row]) -> list[Bar]:
    """Seconds an epoch."""
    longest = max(row.epoch_s for row in rows)
    return [
        Bar(label=row.configuration.name, value=f"{row.epoch_s:.2f} s", percent=100 * row.epoch_s / longest)
        for row in rows
    ]


def step_stacks(rows: Sequence[Row]) -> list[Stack]:
    """The parts of the mean step, all on one scale."""
    longest = max(row.parts.step for row in rows)
    return [
        Stack(
            label=row.configuration.name,
            value=f"{row.parts.step:.1f} ms",
            pieces=tuple(_piece(row, part, longest) for part in PARTS),
        )
        for row in rows
    ]


def speed_up_plot(rows: Sequence[Row]) -> Plot | None:
    """The speed-up over the number of replicas; None for a single number, which is no curve."""
    replicas = sorted({row.configuration.replicas for row in rows})
    if len(replicas) < 3:
        return None
    highest = max(max(row.speed_up, row.configuration.hardware) for row in rows)
    same = [row for row in rows if row.configuration.layout in ("one device", "same total")]
    times = [row for row in rows if row.configuration.layout in ("one device", "N times the total")]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - 1) / (replicas[-1] - 1)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - y / highest * (HEIGHT - _TOP - _BOTTOM)

    def curve(name: str, kind: str, values: Sequence[tuple[int, float]]) -> Curve:
        points = tuple((*place(x, y), f"{name}, {x} replicas: {y:.2f}") for x, y in values)
        return Curve(name=name, kind=kind, points=points)

    return Plot(
        curves=(
            curve(
                "what the hardware can give",
                "ideal",
                [(r.configuration.replicas, r.configuration.hardware) for r in same],
            ),
            curve("same total", "same", [(row.configuration.replicas, row.speed_up) for row in same]),
            curve("N times the total", "times", [(row.configuration.replicas, row.speed_up) for row in times]),
        ),
        x_ticks=tuple((place(number, 0)[0], number) for number in replicas),
        y_ticks=tuple((place(1, number)[1], number) for number in _ticks(highest)),
    )


def _piece(row: Row, part: str, longest: float) -> Piece:
    ms = max(0.0, getattr(row.parts, part))
    return Piece(part=part, ms=ms, percent=100 * ms / longest, share=ms / row.parts.step)


def _ticks(highest: float) -> range:
    step = max(1, -(-int(highest) // _MOST_TICKS))
    return range(0, int(highest) + 1, step)


STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --ink: #22252a; --quiet: #666b73; --line: #e3e4e0; --track: #eeefeb;
  --accent: #2f5d8a; --second: #c06a14; --mark: #22252a;
  --input: #8a68b4; --forward: #2b6cb3; --backward: #72aee0; --exchange: #de8a26; --update: #4a9a5c;
  --waiting: #c9504e; --other: #a7abb1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --card: #1b1e22; --ink: #e5e7ea; --quiet: #9ba1a9; --line: #2d3137; --track: #24282d;
    --accent: #5f9bd0; --second: #eb9f4c; --mark: #e5e7ea;
    --input: #b398dc; --forward: #5d9fe4; --backward: #37689d; --exchange: #eb9f4c; --update: #6cbb7c;
    --waiting: #e47977; --other: #737981;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 80rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 3rem 0 .4rem; }
h3 { font-size: .95rem; margin: 1.75rem 0 .5rem; }
p { margin: .3rem 0 1rem; max-width: 46rem; }
.quiet, figcaption, dt { color: var(--quiet); }
.small { font-size: .875rem; }
code { font: .92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10rem), 1fr)); gap: .75rem; }
.cards { margin: 1.75rem 0 0; padding: 0; list-style: none; }
.cards li { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.cards b { display: block; font-size: 1.7rem; font-weight: 600; line-height: 1.25; }
.cards b, .bar .value, td { font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { padding: .5rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--quiet); font-weight: 500; font-size: .8rem; }
tbody th { font-weight: 500; }
th.words, td.words { text-align: left; }
th:first-child { position: sticky; left: 0; background: var(--card); }
figure { margin: 1rem 0 0; }
.bar { display: grid; grid-template-columns: 13.5rem 1fr 6rem; gap: .75rem; align-items: center; margin: .4rem 0; }
.bar .label { font-size: .875rem; }
.bar .value { font-size: .875rem; text-align: right; }
.track { position: relative; display: flex; height: 1.15rem; background: var(--track); border-radius: .2rem; }
.fill { background: var(--accent); border-radius: .2rem; }
.track > span:first-child { border-radius: .2rem 0 0 .2rem; }
.ideal-mark { position: absolute; top: -.2rem; bottom: -.2rem; width: 2px; margin-left: -1px; background: var(--mark); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .75rem 0 .25rem; padding: 0; list-style: none; }
.legend { font-size: .8125rem; color: var(--quiet); }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem; margin-right: .4rem; }
.legend i { vertical-align: -.05rem; }
.legend i.line { height: 0; width: 1.3rem; border-top: 2px solid; border-radius: 0; vertical-align: .25rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg text { font-size: 12px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 2; }
svg .ideal polyline { stroke: var(--quiet); stroke-dasharray: 3 4; }
svg .same polyline { stroke: var(--accent); }
svg .times polyline { stroke: var(--second); }
.legend i.line.ideal { border-color: var(--quiet); border-top-style: dashed; }
.legend i.line.same { border-color: var(--accent); }
.legend i.line.times { border-color: var(--second); }
svg .same circle { fill: var(--accent); }
svg .times circle { fill: var(--second); }
svg .ideal circle { display: none; }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .35rem 1rem; margin: .75rem 0 0; font-size: .875rem; }
dd { margin: 0; max-width: 46rem; overflow-wrap: anywhere; }
pre { margin: .75rem 0 0; padding: .7rem .9rem; background: var(--card); border: 1px solid var(--line); }
pre { border-radius: .5rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem; }
@media (max-width: 44rem) {
  main { padding: 1.5rem 1rem 3rem; }
  svg text { font-size: 16px; }
  .bar { grid-template-columns: 1fr auto; gap: .1rem .75rem; margin: .7rem 0; }
  .bar .track { grid-column: 1 / -1; grid-row: 2; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .6rem; }
}
"""


TEMPLATE = """\
{% macro table(caption, headings, rows) -%}
<div class="scroll" tabindex="0" role="region" aria-label="{{ caption }}">
<table>
<thead><tr>
{%- for heading in headings %}
<th scope="col"{{ ' class=words' if heading in text_columns }}>{{ heading }}</th>
{%- endfor %}
</tr></thead>
<tbody>
{%- for row in rows %}
<tr><th scope="row" class="words">{{ row[0] }}</th>
{%- for cell in row[1:] %}
<td{{ ' class=words' if headings[loop.index] in text_columns }}>{{ cell }}</td>
{%- endfor %}
</tr>
{%- endfor %}
</tbody>
</table>
</div>
{%- endmacro %}
{% macro bars(rows) -%}
{%- for bar in rows %}
<div class="bar"><span class="label">{{ bar.label }}</span>
<span class="track"><span class="fill" style="width:{{ '%.2f' % bar.percent }}%"></span>
{%- if bar.ideal_percent is not none %}<span class="ideal-mark" style="left:{{ '%.2f' % bar.ideal_percent }}%"></span>
{%- endif %}</span>
<span class="value">{{ bar.value }}</span></div>
{%- endfor %}
{%- endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>Scaling of {{ result.recipe }}, {{ result.date }}</title>
<style>
{{ style|safe }}</style>
</head>
<body>
<main>
<header>
<h1>Scaling of {{ result.recipe }}</h1>
<p class="quiet">{{ result.title }}. {{ result.date }}, {{ result.machine.processor }},
{{ result.machine.cores }} CPU cores.</p>
<ul class="cards">
{%- for row in replicated %}
<li><span class="small quiet">{{ row.configuration.name }}</span>
<b>{{ '%.2f' % row.speed_up }}×</b>
<span class="small quiet">as fast as 1 device; {{ '%.0f' % (100 * row.efficiency) }}% efficient on
{{ row.configuration.resource }}</span></li>
{%- endfor %}
</ul>
</header>

<section aria-labelledby="speed">
<h2 id="speed">Speed</h2>
{{ table('Speed of each configuration', row_headings, row_cells) }}
{%- if plot %}
<h3>Speed-up over the number of replicas</h3>
<figure id="plot-speed-up">
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="Speed-up over the number of replicas">
{%- for y, number in plot.y_ticks %}
<line class="grid" x1="{{ plot.left }}" x2="{{ plot.right }}" y1="{{ '%.1f' % y }}" y2="{{ '%.1f' % y }}"/>
<text x="{{ plot.left - 8 }}" y="{{ '%.1f' % (y + 4) }}" text-anchor="end">{{ number }}</text>
{%- endfor %}
{%- for x, number in plot.x_ticks %}
<text x="{{ '%.1f' % x }}" y="{{ plot.bottom + 18 }}" text-anchor="middle">{{ number }}</text>
{%- endfor %}
<text x="{{ (plot.left + plot.right) / 2 }}" y="{{ plot.bottom + 36 }}" text-anchor="middle">replicas</text>
{%- for curve in plot.curves %}
<g class="{{ curve.kind }}"><polyline points="{{ curve.path }}"/>
{%- for x, y, words in curve.points %}
<circle cx="{{ '%.1f' % x }}" cy="{{ '%.1f' % y }}" r="3.5"><title>{{ words }}</title></circle>
{%- endfor %}
</g>
{%- endfor %}
</svg>
<ul class="legend">
{%- for curve in plot.curves %}<li><i class="line {{ curve.kind }}"></i>{{ curve.name }}</li>{% endfor -%}
</ul>
</figure>
{%- endif %}
<h3>Examples a second</h3>
<figure id="plot-throughput">{{ bars(throughput) }}
<figcaption class="small">The line marks what as much hardware could give: 1 device's examples a second, times the
hardware.</figcaption></figure>
<h3>Seconds an epoch{{ ', extrapolated where the table says so' if extrapolated }}</h3>
<figure id="plot-epoch">{{ bars(epochs) }}</figure>
</section>

<section aria-labelledby="parts">
<h2 id="parts">Where the time of a step goes</h2>
<p class="small quiet">Milliseconds of the mean step, mean over the replicas. All bars have one scale.</p>
<figure id="plot-parts">
<ul class="legend">
{%- for part in parts %}<li><i style="background:var(--{{ part }})"></i>{{ part }}</li>{% endfor -%}
</ul>
{%- for stack in stacks %}
<div class="bar"><span class="label">{{ stack.label }}</span>
<span class="track">
{%- for piece in stack.pieces %}<span style="width:{{ '%.3f' % piece.percent }}%;background:var(--{{ piece.part }})"
title="{{ piece.part }}: {{ '%.1f' % piece.ms }} ms, {{ '%.0f' % (100 * piece.share) }}%"></span>{% endfor -%}
</span>
<span class="value">{{ stack.value }}</span></div>
{%- endfor %}
</figure>
<h3>In milliseconds</h3>
{{ table('Parts of a step in milliseconds', part_headings, part_cells) }}
</section>

<section aria-labelledby="how">
<h2 id="how">How it was measured</h2>
<dl>
{%- for name, said in facts %}
<dt>{{ name }}</dt><dd>{{ said }}</dd>
{%- endfor %}
</dl>
<pre><code>{{ result.command }}</code></pre>
</section>

<section aria-labelledby="words">
<h2 id="words">What the rows and columns mean</h2>
<dl>
{%- for name, said in definitions %}
<dt>{{ name }}</dt><dd>{{ said }}</dd>
{%- endfor %}
</dl>
</section>
{%- if published %}

<section aria-labelledby="published">
<h2 id="published">{{ published_title }}</h2>
<p class="small quiet">{{ published_note }}</p>
{{ table(published_title, published_headings, published) }}
</section>
{%- endif %}
</main>
</body>
</html>
"""


def render_page(result: ScalingResult) -> str:
    """The whole page; every text in it is escaped.

    Raises:
        MissingExtraError: jinja2, which torch brings, is not installed.
    """
    jinja2 = require("jinja2", "plots")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = result.rows
    page: str = environment.from_string(TEMPLATE).render(
        result=result,
        style=STYLE,
        replicated=[row for row in rows if row.configuration.replicas > 1],
        text_columns=TEXT_COLUMNS,
        row_headings=ROW_HEADINGS,
        row_cells=[row_cells(row) for row in rows],
        part_headings=PART_HEADINGS,
        part_cells=[part_cells(row) for row in rows],
        plot=speed_up_plot(rows),
        width=WIDTH,
        height=HEIGHT,
        throughput=throughput_bars(rows),
        epochs=epoch_bars(rows),
        extrapolated=is_extrapolated(rows),
        parts=PARTS,
        stacks=step_stacks(rows),
        facts=facts(result),
        definitions=definitions(result),
        published=[published_cells(row) for row in PUBLISHED.get(result.recipe, ())],
        published_headings=PUBLISHED_HEADINGS,
        published_title=PUBLISHED_TITLE,
        published_note=PUBLISHED_NOTE,
    )
    return page


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
        atomic_write(path, text)
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
