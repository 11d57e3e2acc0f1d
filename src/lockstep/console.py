"""Where standard output goes, and how text is fitted to it: a terminal, a notebook, or else a pipe or a file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Literal

GAP = "  "  # between the columns of a table
_NO_BREAK = "\xa0"  # textwrap breaks lines at spaces, and not here

COLUMNS_VARIABLE = "LOCKSTEP_COLUMNS"
"""The environment variable with the columns of the terminal on which a launcher shows what a worker prints."""

BAR_VARIABLE = "LOCKSTEP_BAR"
"""The environment variable that is set in the worker whose output a launcher shows as it comes, on a terminal."""

Output = Literal["terminal", "notebook", "file"]


def output() -> Output:
    """Where standard output goes now; "file" stands for pipes too."""
    if sys.stdout is None:
        return "file"
    # Looked up and not imported: ipykernel is no dependency, and a process without it is in no notebook.
    iostream = sys.modules.get("ipykernel.iostream")  # loaded in every kernel of a notebook
    if iostream is not None and isinstance(sys.stdout, iostream.OutStream):
        return "notebook"
    return "terminal" if sys.stdout.isatty() else "file"


def width() -> int | None:
    """Columns of the terminal; None if standard output is none, so that lines in files and notebooks stay whole.

    The output of a worker of ``lockstep run`` is a pipe, and its launcher says how wide the terminal behind it is.
    """
    if output() == "terminal":
        return shutil.get_terminal_size().columns
    behind = os.environ.get(COLUMNS_VARIABLE, "") if _is_process_output() else ""
    return int(behind) if behind.isdecimal() else None


def shows_bar() -> bool:
    """Whether a line that overwrites itself, as a progress bar does, is seen as one, perhaps through a pipe."""
    return output() == "terminal" or (BAR_VARIABLE in os.environ and _is_process_output())


def _is_process_output() -> bool:
    """Whether ``sys.stdout`` is the standard output of this process, and not what a program has put in its place."""
    try:
        return sys.stdout is not None and sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):  # a stream in memory has no number
        return False


def bold(text: str) -> str:
    """The text in bold, on a terminal that takes it. https://no-color.org turns it off."""
    plain = output() != "terminal" or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[1m{text}\x1b[0m"


def line_of(title: str, items: Sequence[str]) -> str:
    """``title: item, item`` with a bold title; broken between items where the terminal is too narrow."""
    unbroken_title, *unbroken_items = (part.replace(" ", _NO_BREAK) for part in (title, *items))
    line = fill(f"{unbroken_title}: {', '.join(unbroken_items)}").replace(_NO_BREAK, " ")
    return line.replace(title, bold(title), 1)


def fill(text: str) -> str:
    """The text with lines that are too long for the terminal broken at spaces, and indented from the second on."""
    columns = width()
    if columns is None:
        return text
    return "\n".join(_wrapped(line, columns) for line in text.split("\n"))


def fill_error(line: str) -> str:
    """Like ``fill``, for a line on standard error, whose width may differ. In a pipe or a file it stays one line."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (AttributeError, OSError, ValueError):  # no standard error, or no terminal
        return line
    return _wrapped(line, columns) if columns else line


def _wrapped(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    return textwrap.fill(line, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def items_that_fit(items: Sequence[str], columns: int) -> list[str]:
    """The first items that fit into ``columns``, each after a comma and a space."""
    fitting: list[str] = []
    for item in items:
        columns -= len(item) + 2
        if columns < 0:
            break
        fitting.append(item)
    return fitting


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Sets cells in columns under a rule of dashes; a column of numbers is aligned to the right.

    Columns that a terminal has no space for follow in another table below, which repeats the first column.
    """
    available = width()
    blocks: list[list[list[str]]] = [[]]
    for cells in zip(headings, *rows, strict=True):
        size = max(map(len, cells))
        align = str.rjust if all(map(is_number, cells[1:])) else str.ljust
        heading, *aligned = (align(cell, size) for cell in cells)
        column = [heading, "-" * size, *aligned]
        beside = sum(len(column[0]) + len(GAP) for column in blocks[-1])
        # The first column always stands with at least one other, however narrow the terminal is.
        if available is not None and len(blocks[-1]) > 1 and beside + size > available:
            blocks.append([blocks[0][0]])
        blocks[-1].append(column)
    tables = ("\n".join(GAP.join(cells).rstrip() for cells in zip(*block, strict=True)) for block in blocks)
    return "\n\n".join(tables)


def counted(number: int, noun: str) -> str:
    """``1 line``, ``128 lines``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_number(cell: str) -> bool:
    """Whether a cell of a table is a number, or stands for one."""
    text = cell.replace(",", "").removesuffix("%")
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


def write_line(text: str) -> None:
    """Writes a line to standard output, above a live progress line if there is one."""
    tqdm = sys.modules.get("tqdm")  # if it is not loaded there is no live line
    if tqdm is None:
        sys.stdout.write(text + "\n")
    else:
        tqdm.tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
