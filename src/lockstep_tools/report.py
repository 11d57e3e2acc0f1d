"""The table, the CSV file and the curves of a run, and tables in Markdown.

The PNG is made with matplotlib's object interface: no window, no pyplot state, no settings of the caller touched.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import console
from lockstep.atomic_files import atomic_file, atomic_write
from lockstep.extras import require
from lockstep.train.curves import draw_curves

if TYPE_CHECKING:
    from lockstep.train.logs import History


# Columns that are no metrics: heading and format.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "seconds": ("seconds", "{:.1f}"),
    "ms_per_step": ("ms/step", "{:.1f}"),
    "examples_per_s": ("examples/s", "{:,.0f}"),
}


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a column of numbers is aligned to the right.

    Example:
        >>> print(markdown_table(["who", "ms"], [["ours", "1"]]))
        | who | ms |
        | --- | ---: |
        | ours | 1 |
    """
    columns = zip(headings, *rows, strict=True)
    rule = ["---:" if all(map(console.is_number, cells)) else "---" for _, *cells in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def epochs_table(history: History) -> str:
    """The table of a run: a row for each epoch, a column for each name of the logs, and the times of the steps."""
    columns = _epoch_columns(history)
    rows = [
        [str(epoch + 1), *(_format(name, by[epoch]) if epoch in by else "-" for name, by in columns.items())]
        for epoch in history.epoch
    ]
    return console.text_table(["epoch", *(_COLUMNS.get(name, (name,))[0] for name in columns)], rows)


def write_history(history: History, path: str | os.PathLike[str]) -> Path:
    """Writes a CSV file, whole or not at all: a row for each epoch, from 1, with all logs and times of the steps.

    The times of an epoch that was interrupted and resumed are those of its steps after that.
    """
    columns = _epoch_columns(history, without=())
    rows = [[epoch + 1, *(column.get(epoch, "") for column in columns.values())] for epoch in history.epoch]
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([["epoch", *columns], *rows])
    return atomic_write(Path(path), text.getvalue())


def _epoch_columns(history: History, without: Collection[str] = ("learning_rate",)) -> dict[str, dict[int, float]]:
    """Name -> epoch -> number: the logs and the times of the steps."""
    columns = {
        name: dict(zip(history.logged_in[name], values, strict=True))
        for name, values in history.history.items()
        if name not in without
    }
    columns["seconds"] = {timing.epoch: timing.seconds for timing in history.timing}
    columns["ms_per_step"] = {timing.epoch: 1000 * timing.median_step_s for timing in history.timing}
    columns["examples_per_s"] = {timing.epoch: timing.examples_per_s for timing in history.timing}
    return columns


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Metrics in one line: ``loss 1.2630, accuracy 0.3530``."""
    return ", ".join(f"{name} {_format(name, value)}" for name, value in metrics.items())


def _format(name: str, value: float) -> str:
    return _COLUMNS.get(name, ("", "{:.4f}"))[1].format(value)


def write_curves(
    history: History,
    path: str | os.PathLike[str],
    *,
    title: str,
    settings: str = "",
    test: Mapping[str, float] | None = None,
) -> Path:
    """Writes the curves of a run as a PNG, aside and then renamed, and returns its path. See ``draw_curves``."""
    figure = require("matplotlib.figure", "plots").Figure()
    draw_curves(figure, history, title=title, settings=settings, test=test)
    with atomic_file(Path(path)) as partial:
        figure.savefig(partial, format="png", dpi=160)
    return Path(path)
