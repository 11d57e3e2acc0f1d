"""The plots of a scaling run as shapes: bars in parts of a width, and curves in a drawing's own units. Pure arithmetic.

What they look like is the page's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.scaling.figures import Row
from lockstep.scaling.parts import PARTS

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
