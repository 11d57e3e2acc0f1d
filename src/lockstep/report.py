"""Tables and curves of a run: text and Markdown tables, and a PNG with a panel for the loss and one for each metric.

Curves are drawn with matplotlib's object interface: no window, no pyplot state, no settings of the caller touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from lockstep import console
from lockstep.atomic_files import atomic_file
from lockstep.errors import ConfigError
from lockstep.extras import require

if TYPE_CHECKING:
    from lockstep.train.logs import History


# Columns that are no metrics, and are not drawn: heading and format.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "epoch": ("epoch", "{:.0f}"),
    "seconds": ("seconds", "{:.1f}"),
    "ms_per_step": ("ms/step", "{:.1f}"),
    "examples_per_s": ("examples/s", "{:,.0f}"),
    "lr": ("lr", "{:.2e}"),
}


_GAP = "  "


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Sets cells in columns under a rule of dashes; a column of numbers is aligned to the right.

    Columns that a terminal has no space for follow in another table below, which repeats the first column.
    """
    width = console.width()
    blocks: list[list[list[str]]] = [[]]
    for cells in zip(headings, *rows, strict=True):
        size = max(map(len, cells))
        align = str.rjust if all(map(_is_number, cells[1:])) else str.ljust
        heading, *others = (align(cell, size) for cell in cells)
        column = [heading, "-" * size, *others]
        beside = sum(len(each[0]) + len(_GAP) for each in blocks[-1])
        if width is not None and len(blocks[-1]) > 1 and beside + size > width:
            blocks.append([blocks[0][0]])
        blocks[-1].append(column)
    tables = ("\n".join(_GAP.join(cells).rstrip() for cells in zip(*block, strict=True)) for block in blocks)
    return "\n\n".join(tables)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a column of numbers is aligned to the right.

    Example:
        >>> print(markdown_table(["who", "ms"], [["ours", "1"]]))
        | who | ms |
        | --- | ---: |
        | ours | 1 |
    """
    columns = zip(headings, *rows, strict=True)
    rule = ["---:" if all(map(_is_number, cells)) else "---" for _, *cells in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def _is_number(cell: str) -> bool:
    text = cell.replace(",", "").removesuffix("%")
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


def epochs_table(history: Mapping[str, Sequence[float]]) -> str:
    """The table of a run: a row an epoch, a column for each name; a run that was cut short lacks values at the end."""
    epochs = max((len(values) for values in history.values()), default=0)
    rows = [
        [str(epoch + 1), *(_format(name, v[epoch]) if epoch < len(v) else "-" for name, v in history.items())]
        for epoch in range(epochs)
    ]
    headings = ["epoch", *(_COLUMNS.get(name, (name,))[0] for name in history)]
    return text_table(headings, rows)


def history_columns(history: History) -> dict[str, list[float]]:
    """The logs of every epoch, and beside them how long its steps took and how many examples a second went through."""
    return {
        **history.history,
        "seconds": [timing.seconds for timing in history.timing],
        "ms_per_step": [1000 * timing.median_step_s for timing in history.timing],
        "examples_per_s": [timing.examples_per_s for timing in history.timing],
    }


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Metrics in one line: ``loss 1.2630, accuracy 0.3530``."""
    return ", ".join(f"{name} {_format(name, value)}" for name, value in metrics.items())


def _format(name: str, value: float) -> str:
    return _COLUMNS.get(name, ("", "{:.4f}"))[1].format(value)


_CURVES = (("", "training", "#2f5d8a"), ("val_", "validation", "#d9822b"))


def draw_curves(
    history: Mapping[str, Sequence[float]],
    path: str | os.PathLike[str],
    *,
    title: str,
    settings: str = "",
    test: Mapping[str, float] | None = None,
) -> Path:
    """Draws loss and metrics over the epochs as a PNG, written aside and renamed; returns its path.

    Args:
        history: name -> one value an epoch; ``val_NAME`` is drawn in the panel of ``NAME``, which may lack the other.
        path: the file; its folder is made if missing.
        title: a line above the panels.
        settings: what else the results depend on, written in small letters below the panels.
        test: name -> the final test result, drawn as a dashed line over all epochs.

    Raises:
        ConfigError: the history has no curve.
        MissingExtraError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name.removeprefix("val_") for name in history if name not in _COLUMNS))
    if not any(history.get(name) or history.get(f"val_{name}") for name in names):
        raise ConfigError(f"a history of {sorted(history)} holds no epoch to draw; expected 'loss'; train first")
    require("matplotlib", "plots")
    locator = require("matplotlib.ticker", "plots").MaxNLocator
    figure = require("matplotlib.figure", "plots").Figure(
        figsize=(4.4 * len(names) + 0.4, 4.0), dpi=160, layout="constrained"
    )
    figure.suptitle(title)
    figure.supxlabel(fill(settings, 68 * len(names)), fontsize=8, color="#666666")
    epochs = max(len(values) for values in history.values())
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for prefix, label, color in _CURVES:
            if values := history.get(f"{prefix}{name}"):
                axes.plot(range(1, len(values) + 1), values, color=color, label=label, linewidth=1.8, marker="o")
        if test and name in test:
            axes.axhline(
                test[name], color="#5c8a3c", label=f"test {_format(name, test[name])}", linestyle="--", zorder=1
            )
        axes.set(title=name, xlabel="epoch", xlim=(0.5, epochs + 0.5))
        axes.xaxis.set_major_locator(locator(nbins=8, integer=True, min_n_ticks=1))
        axes.grid(axis="y", color="#e5e5e5")
        axes.set_axisbelow(True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    with atomic_file(Path(path)) as partial:
        figure.savefig(partial, format="png")
    return Path(path)
