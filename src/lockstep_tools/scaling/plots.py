"""The plots of both benchmarks by matplotlib, as SVG text that is legible on light and on dark paper."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.extras import require
from lockstep.parallel.pipeline_trace import ActionKind, PipelineTrace
from lockstep_tools.scaling.measure import PARTS
from lockstep_tools.scaling.runner import Row

_COLORS = ("#8a68b4", "#2b6cb3", "#72aee0", "#de8a26", "#4a9a5c", "#c9504e", "#a7abb1")  # of PARTS
_BLUE, _ORANGE, _GREY = "#3f78b0", "#c9762a", "#80868e"
# The actions of a worker's first stage are dark, those of further ones light.
_ACTIONS: Mapping[ActionKind, tuple[str, str, str]] = {
    "forward": ("forward", "#3a6ea5", "#a9c6e4"),
    "backward": ("backward", "#4b8a63", "#abd4ba"),
    "inputs": ("backward for the inputs", "#4b8a63", "#abd4ba"),
    "weights": ("backward for the weights", "#b97d2a", "#ecd0a0"),
}
_NARROW = 0.012  # of the width; an action that takes less has no number


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """A figure, and what gives its SVG: text stays text, and the same drawing is the same file."""
    matplotlib = require("matplotlib", "plots")
    figure = require("matplotlib.figure", "plots").Figure(figsize=(width, height), layout="constrained")

    def svg() -> str:
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
        drawn = text.getvalue()
        # matplotlib writes an empty metadata block with addresses of its vocabulary; the page loads and names nothing.
        return re.sub(r"\s*<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)

    # Text stays text, which a browser sets and a person can search; a fixed salt gives elements the same ids in every
    # run (test_the_same_result_draws_the_same_page).
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 9}):
        yield figure, svg


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_GREY)
    axes.tick_params(colors=_GREY, length=0)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=_GREY)


def _legend(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    figure.legend(
        handles, labels, frameon=False, labelcolor=_GREY, ncols=len(labels), loc="outside lower left",
        handlelength=0.8, columnspacing=1.2,
    )  # fmt: skip


def draw_scaling(rows: Sequence[Row]) -> str:
    """The speed-up by replicas, and the parts of a step."""
    heights = [2.6, 0.25 * len(rows) + 0.8]
    with _figure(7.4, sum(heights) + 0.8) as (figure, svg):
        speed_up, parts = figure.subplots(2, 1, height_ratios=heights)
        _plot_speed_up(speed_up, rows)
        _plot_parts(parts, rows)
        return svg()


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


def _plot_parts(axes: Any, rows: Sequence[Row]) -> None:
    names = [row.configuration.name for row in rows]
    starts = [0.0] * len(rows)
    for part, color in zip(PARTS, _COLORS, strict=True):
        # "other" is what is left of the step and may be slightly below zero, which ``barh`` would draw backwards.
        values = [max(0.0, getattr(row.parts, part)) for row in rows]
        axes.barh(names, values, left=starts, color=color, label=part)
        starts = [before + value for before, value in zip(starts, values, strict=True)]
    axes.invert_yaxis()
    _style(axes, "Parts of the mean step, ms")
    _legend(axes.figure, *axes.get_legend_handles_labels())


def draw_pipelines(traces: Mapping[str, PipelineTrace], *, length: float | None = None) -> str:
    """Traces below each other under their names, on one scale: a row for each worker, a bar for each action.

    ``length``: of time that fills the width; by default that of the longest trace.
    """
    patches = require("matplotlib.patches", "plots")
    length = length or max(trace.length for trace in traces.values())
    workers = [len(trace.workers) for trace in traces.values()]
    kinds = {slot.action.kind for trace in traces.values() for slots in trace.workers for slot in slots}
    with _figure(9.2, 0.28 * sum(workers) + 0.35 * len(workers) + 0.4) as (figure, svg):
        panels = figure.subplots(len(traces), 1, squeeze=False, height_ratios=workers)[:, 0]
        for axes, (name, trace) in zip(panels, traces.items(), strict=True):
            _plot_trace(axes, trace, length)
            axes.set_title(f"{name}, idle {trace.bubble:.1%}", loc="left", fontsize=9, color=_GREY)
        actions = [action for kind, action in _ACTIONS.items() if kind in kinds]
        _legend(figure, [patches.Patch(color=color) for _, color, _ in actions], [label for label, *_ in actions])
        return svg()


def _plot_trace(axes: Any, trace: PipelineTrace, length: float) -> None:
    for worker, slots in enumerate(trace.workers):
        stages = sorted({slot.action.stage for slot in slots})
        shades = [1 + (stages.index(slot.action.stage) > 0) for slot in slots]
        spans = [(slot.begin - trace.begin, slot.end - slot.begin) for slot in slots]
        colors = [_ACTIONS[slot.action.kind][shade] for slot, shade in zip(slots, shades, strict=True)]
        axes.hlines(worker, 0, trace.length, _GREY, "dotted", linewidth=0.8, zorder=0)  # seen where the worker waits
        axes.broken_barh(spans, (worker - 0.42, 0.84), facecolors=colors, edgecolor="white", linewidth=0.4)
        for slot, shade, (begin, width) in zip(slots, shades, spans, strict=True):
            if width >= _NARROW * length:
                number, ink = slot.action.microbatch + 1, "white" if shade == 1 else "#24292f"
                axes.text(begin + width / 2, worker, number, ha="center", va="center", color=ink, fontsize=8)
    axes.set_xlim(0, length)
    axes.set_ylim(len(trace.workers) - 0.5, -0.5)
    axes.set_yticks(range(len(trace.workers)), [f"worker {worker}" for worker in range(len(trace.workers))])
    axes.set_xticks([])
    axes.tick_params(colors=_GREY, length=0)
    axes.spines[:].set_visible(False)
