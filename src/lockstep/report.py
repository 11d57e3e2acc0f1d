"""The curves of a run as a picture: one panel for the loss and one for each metric, training beside validation.

Drawn with matplotlib's object interface: no window, no pyplot state, no settings of the caller touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.atomic_files import atomic_file
from lockstep.errors import ConfigError
from lockstep.extras import require

if TYPE_CHECKING:
    from lockstep.train.logs import History


# How the values of a column are written: heading and format. Whatever is not named here is a metric.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "epoch": ("epoch", "{:.0f}"),
    "seconds": ("seconds", "{:.1f}"),
    "ms_per_step": ("ms/step", "{:.1f}"),
    "examples_per_s": ("examples/s", "{:,.0f}"),
    "lr": ("lr", "{:.2e}"),
}


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Sets cells in columns under a rule; a column of numbers is aligned to the right.

    Args:
        headings: one a column.
        rows: rows of as many cells as there are headings.

    Example:
        >>> print(text_table(["device", "cores"], [["cpu:0", "1"], ["cpu:1", "1"]]))
        device  cores
        ------  -----
        cpu:0       1
        cpu:1       1
    """
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = [list(headings), ["-" * width for width in widths], *rows]
    return "\n".join(_line(cells, widths, right) for cells in lines)


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


def epochs_table(history: Mapping[str, Sequence[float]]) -> str:
    """The table of a run: a row an epoch, a column for everything that the history recorded.

    Args:
        history: name -> one value an epoch, in the order in which the columns are wanted; a value may be missing at
            the end of a list, where a run was cut short.
    """
    epochs = max((len(values) for values in history.values()), default=0)
    headings = ["epoch", *(_heading(name) for name in history)]
    rows = [
        [str(epoch + 1), *(_cell(name, values, epoch) for name, values in history.items())] for epoch in range(epochs)
    ]
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
    return ", ".join(f"{_heading(name)} {_format(name, value)}" for name, value in metrics.items())


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    aligned = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return "  ".join(aligned).rstrip()


def _is_number(cell: str) -> bool:
    text = cell.replace(",", "").removesuffix("%")
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


def _heading(name: str) -> str:
    return _COLUMNS[name][0] if name in _COLUMNS else name


def _cell(name: str, values: Sequence[float], epoch: int) -> str:
    return _format(name, values[epoch]) if epoch < len(values) else "-"


def _format(name: str, value: float) -> str:
    return _COLUMNS.get(name, ("", "{:.4f}"))[1].format(value)


_TRAINING, _VALIDATION, _TEST = "#2f5d8a", "#d9822b", "#5c8a3c"
_INK, _QUIET = "#30343b", "#d9dce1"
# Recorded with the history, and no measure of how well the model does.
_NOT_CURVES = frozenset({"epoch", "seconds", "ms_per_step", "examples_per_s", "lr"})


def draw_curves(
    history: Mapping[str, Sequence[float]],
    path: str | os.PathLike[str],
    *,
    title: str,
    test: Mapping[str, float] | None = None,
) -> Path:
    """Draws loss and metrics over the epochs and writes them as a PNG.

    The file is written aside and renamed, so that a reader never sees half a picture.

    Args:
        history: name -> one value an epoch; ``val_NAME`` is drawn in the panel of ``NAME``, which may lack the other.
        path: the file to write; its folder is made where it is missing.
        title: a line above the panels.
        test: name -> the final test result, drawn as a mark at the last epoch.

    Returns:
        The path written.

    Raises:
        ConfigError: the history holds no curve.
        MissingExtraError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name.removeprefix("val_") for name in history if name not in _NOT_CURVES))
    if not any(history.get(name) or history.get(f"val_{name}") for name in names):
        raise ConfigError(f"a history of {sorted(history)} holds no epoch to draw; expected 'loss'; train first")
    require("matplotlib", "plots")
    figure = _figure(len(names), title)
    for axes, name in zip(figure.axes, names, strict=True):
        _panel(axes, name, history, (test or {}).get(name))
    return _write(figure, Path(path))


def _figure(panels: int, title: str) -> Any:
    figure = require("matplotlib.figure", "plots").Figure(
        figsize=(4.4 * panels + 0.4, 3.6), dpi=160, facecolor="white", layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.05)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, color=_INK)
    figure.subplots(1, panels)
    return figure


def _panel(axes: Any, name: str, history: Mapping[str, Sequence[float]], test: float | None) -> None:
    training, validation = history.get(name, ()), history.get(f"val_{name}", ())
    epochs = max(len(training), len(validation))
    if training:
        _curve(axes, training, _TRAINING, "training")
    if validation:
        _curve(axes, validation, _VALIDATION, "validation")
    if test is not None:
        axes.plot([epochs], [test], marker="D", markersize=5.5, color=_TEST, label="test", linestyle="none", zorder=4)
    _quiet(axes, name, epochs)


def _curve(axes: Any, values: Sequence[float], color: str, label: str) -> None:
    epochs = range(1, len(values) + 1)
    axes.plot(epochs, values, color=color, label=label, linewidth=1.8, marker="o", markersize=3.6, zorder=3)


def _quiet(axes: Any, name: str, epochs: int) -> None:
    """A light grid, no box, whole epochs on the axis."""
    ticker = require("matplotlib.ticker", "plots")
    axes.set_title(name, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("epoch", fontsize=9, color=_INK)
    axes.set_xlim(0.8, max(epochs, 2) + 0.2)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color=_QUIET, linewidth=0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)


def _write(figure: Any, path: Path) -> Path:
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")
    return path
