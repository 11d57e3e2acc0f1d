"""Tables as plain text: the table of epochs at the end of a run, and the columns that commands print.

Pure functions from values to one string, so that a table reads the same in a terminal, a log file and a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
    """A Markdown table, first column to the left, others to the right.

    Example:
        >>> print(markdown_table(["who", "ms"], [["ours", "1"]]))
        | who | ms |
        | --- | ---: |
        | ours | 1 |
    """
    rule = ["---", *["---:"] * (len(headings) - 1)]
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
