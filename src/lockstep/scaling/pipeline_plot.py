"""Draws traces of a pipeline as SVG: a row for each worker, a box for each action. Pure: traces in, text out.

The background is transparent and the text is grey, so that it is readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

from lockstep.parallel.pipeline_trace import ActionKind, PipelineTrace, Slot

_LABELS: Mapping[ActionKind, str] = MappingProxyType(
    {
        "forward": "forward",
        "backward": "backward",
        "inputs": "backward for the inputs",
        "weights": "backward for the weights",
    }
)
# The first stages of all workers are dark with light numbers, the second ones light with dark numbers.
_FILLS: Mapping[ActionKind, tuple[str, str]] = MappingProxyType(
    {
        "forward": ("#3a6ea5", "#a9c6e4"),
        "backward": ("#4b8a63", "#abd4ba"),
        "inputs": ("#4b8a63", "#abd4ba"),
        "weights": ("#b97d2a", "#ecd0a0"),
    }
)
_INKS = ("#ffffff", "#24292f")
_QUIET, _LINE = "#7d848c", "#9aa0a6"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LEFT, _RIGHT, _TOP, _ROW, _BOX = 72.0, 8.0, 6.0, 26.0, 22.0
_CAPTION, _LEGEND, _GAP = 24.0, 30.0, 14.0
_NUMBER, _NARROW, _SWATCH, _LETTER = 10.5, 9.0, 11.0, 6.1


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How time becomes width."""

    length: float  # of time that fills the width, in the unit of the traces; drawings of one length can be compared
    width: float = 880.0  # of the whole drawing

    @property
    def unit(self) -> float:
        """The width of a unit of time."""
        return (self.width - _LEFT - _RIGHT) / self.length


def draw_trace(table: PipelineTrace, scale: Scale, *, title: str) -> str:
    """One trace; ``title`` is for readers who do not see the drawing."""
    bottom = _TOP + _ROW * len(table.workers)
    return _svg(title, scale, bottom + _LEGEND, [*_rows(table, scale, _TOP), *_legend([table], bottom)])


def draw_traces(tables: Mapping[str, PipelineTrace], scale: Scale, *, title: str) -> str:
    """Several below each other, each under its name."""
    lines: list[str] = []
    top = _TOP
    for name, table in tables.items():
        text = f"{escape(name)}, idle {table.bubble:.1%}"
        lines.append(f'<text x="{_LEFT:g}" y="{top + 14:g}" fill="{_QUIET}">{text}</text>')
        lines += _rows(table, scale, top + _CAPTION)
        top += _CAPTION + _ROW * len(table.workers) + _GAP
    return _svg(title, scale, top + _LEGEND, [*lines, *_legend(list(tables.values()), top)])


def _svg(title: str, scale: Scale, height: float, lines: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scale.width:g} {height:g}" role="img" '
    head += f'font-family="{_FONT}" font-size="12">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *lines, "</svg>", ""])


def _rows(table: PipelineTrace, scale: Scale, top: float) -> list[str]:
    lines = []
    for worker, slots in enumerate(table.workers):
        lines += _row(table, worker, slots, top + _ROW * worker, scale)
    return lines


def _row(table: PipelineTrace, worker: int, slots: Sequence[Slot], top: float, scale: Scale) -> list[str]:
    middle, end = top + _BOX / 2, _LEFT + table.length * scale.unit
    # Where there is no box a line shows that the worker waits.
    place = f'x1="{_LEFT:g}" x2="{end:.2f}" y1="{middle:g}" y2="{middle:g}"'
    lines = [
        f'<text x="{_LEFT - 10:g}" y="{middle + 4:g}" text-anchor="end" fill="{_QUIET}">worker {worker}</text>',
        f'<line {place} stroke="{_LINE}" stroke-width="0.8" stroke-dasharray="1 4"/>',
    ]
    stages = sorted({slot.action.stage for slot in slots})
    for slot in slots:
        left = _LEFT + (slot.begin - table.begin) * scale.unit
        width = (slot.end - slot.begin) * scale.unit
        lines += _box(slot, stages.index(slot.action.stage) % 2, left, top, width)
    return lines


def _box(slot: Slot, shade: int, left: float, top: float, width: float) -> list[str]:
    action = slot.action
    label = f"{_LABELS[action.kind]}, microbatch {action.microbatch + 1}, stage {action.stage}"
    place = f'x="{left + 0.5:.2f}" y="{top:g}" width="{max(width - 1, 0.3):.2f}" height="{_BOX:g}"'
    lines = [f'<rect {place} rx="2" fill="{_FILLS[action.kind][shade]}"><title>{label}</title></rect>']
    if width >= _NARROW:
        lines.append(
            f'<text x="{left + width / 2:.2f}" y="{top + _BOX / 2 + 3.8:.2f}" text-anchor="middle" '
            f'font-size="{_NUMBER:g}" fill="{_INKS[shade]}">{action.microbatch + 1}</text>'
        )
    return lines


def _legend(tables: Sequence[PipelineTrace], bottom: float) -> list[str]:
    kinds = {slot.action.kind for table in tables for slots in table.workers for slot in slots}
    several = any(len({slot.action.stage for slot in slots}) > 1 for table in tables for slots in table.workers)
    lines, left, top = [], _LEFT, bottom + 7
    for kind, label in _LABELS.items():
        if kind not in kinds:
            continue
        for shade in range(2 if several else 1):
            lines.append(
                f'<rect x="{left:.1f}" y="{top:g}" width="{_SWATCH:g}" height="{_SWATCH:g}" rx="2" '
                f'fill="{_FILLS[kind][shade]}"/>'
            )
            left += _SWATCH + 2
        lines.append(f'<text x="{left + 4:.1f}" y="{top + 10:g}" fill="{_QUIET}">{label}</text>')
        left += 4 + _LETTER * len(label) + 22
    if several:
        text = "light: in a worker's second stage"
        lines.append(f'<text x="{left:.1f}" y="{top + 10:g}" fill="{_QUIET}">{text}</text>')
    return lines
