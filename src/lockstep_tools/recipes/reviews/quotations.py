"""Quotation marks of a CSV file that swallow rows: one that is never closed, or that a mark of another row closes.

    0,"bad            the review is the text from here,
    1,good            over all rows between,
    0,"dirty          to the next quotation mark, or to the end of the file

The csv module reads such a file without an error. A review in quotation marks may hold line breaks, so what tells them
apart is what follows the second mark, and whether the lines between look like rows.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.errors import DataError

_FIELD = re.compile(r'"(?P<text>[^"]*(?:""[^"]*)*)(?P<end>"?)(?P<rest>[^,\r\n]*)|[^,\r\n]*')
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_ADVICE = (
    'remove it, close it at the end of the review, or write "" for a mark within a review that has marks around it'
)


class RawLines:
    """The lines of a file, for ``csv.reader``; ``buffer`` has those that were read since it was last cleared."""

    def __init__(self, file: Iterable[str]) -> None:
        self._file = file
        self.buffer: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.buffer.append(line)
            yield line


@dataclass(frozen=True)
class _Quotation:
    """A value in quotation marks: its line in the record, its text, whether a mark ends it, and what stands behind."""

    line: int
    text: str
    ends: bool
    rest: str

    @property
    def lines(self) -> list[str]:
        return _LINE_BREAK.split(self.text)


def _quotations(record: str) -> Iterator[_Quotation]:
    position = 0
    while position <= len(record) and (match := _FIELD.match(record, position)):
        if match["text"] is not None:
            line = len(_LINE_BREAK.findall(record, 0, match.start()))
            yield _Quotation(line, match["text"], bool(match["end"]), match["rest"])
        position = match.end() + 1  # behind the comma


class QuotationCheck:
    """Checks the records of the file ``name``, whose ``columns`` have one called ``label``."""

    def __init__(self, name: str, columns: Sequence[str], label: str) -> None:
        self._name, self._width, self._label = name, len(columns), columns.index(label)
        # Of values of several lines: where they begin, the number of lines below, and the labels of those like rows.
        self._suspects: list[tuple[int, int, list[int]]] = []

    def first_line(self, lines: Sequence[str], last: int) -> int:
        """Checks the lines of a record, of which the last one has a number, and returns the number of the first one.

        Raises a DataError with the line of a quotation mark that is never closed, or closed in the middle of a value.
        """
        lines = list(lines)
        while len(lines) > 1 and not lines[0].strip("\r\n"):
            del lines[0]  # the csv module skips empty lines
        first = last - len(lines) + 1
        if len(lines) > 1 or '"' in lines[0]:
            for quotation in _quotations("".join(lines)):
                self._check(quotation, first + quotation.line)
        return first

    def _check(self, quotation: _Quotation, line: int) -> None:
        inside = quotation.lines
        end = line + len(inside) - 1
        if not quotation.ends:
            lines = end - line if inside[-1] else end - line - 1
            raise DataError(
                f"{self._name}, line {line}: the quotation mark that begins here is never closed, so the {lines} lines"
                f" below would be read as text of one value; {_ADVICE}"
            )
        # A closing mark is followed by a comma or the end of the row; text behind it means that it opens another value.
        if len(inside) > 1 and quotation.rest:
            raise DataError(
                f"{self._name}, line {line}: the quotation mark that begins here is closed by one in the middle of line"
                f" {end}, so the lines between would be read as text of one value; {_ADVICE}"
            )
        labels = [label for text in inside[1:] if (label := self._label_of(text)) is not None]
        if labels:
            self._suspects.append((line, len(inside) - 1, labels))

    def check_length(self, lines: Sequence[str], last: int) -> None:
        """Raises a DataError if a record that the csv module refuses, as too long, has a mark that is not closed."""
        begins = [quotation.line for quotation in _quotations("".join(lines)) if not quotation.ends]
        if len(lines) < 2 or not begins:
            return
        line = last - len(lines) + 1 + begins[0]
        raise DataError(
            f"{self._name}, line {line}: the value in quotation marks that begins here is not closed in the"
            f" {len(lines) - 1} lines below; {_ADVICE}"
        )

    def finish(self, labels: Collection[int]) -> None:
        """Looks at all values of several lines, when the labels of the file are known.

        Raises a DataError for one whose lines are rows, and warns of those that have lines that look like rows.
        """
        suspects: list[int] = []
        for line, below, candidates in self._suspects:
            rows = [label for label in candidates if label in labels]
            # The last line below may be cut before its label.
            if len(rows) > 1 and len(rows) >= below - 1 and not _counts_up(rows):
                raise DataError(
                    f"{self._name}, line {line}: the {below} lines below are within the quotation marks that begin"
                    f" here, and {len(rows)} of them look like rows, with a label and a review; {_ADVICE}"
                )
            if rows:
                suspects.append(line)
        if suspects:
            lines = ", ".join(map(str, suspects[:5])) + (", ..." if len(suspects) > 5 else "")
            noun = "line" if len(suspects) == 1 else "lines"
            warnings.warn(
                f"{self._name}, {noun} {lines}: within the quotation marks that begin here there are lines that look"
                f" like rows, and are read as text of one value; if the mark is none of a pair, {_ADVICE}",
                stacklevel=3,
            )

    def _label_of(self, line: str) -> int | None:
        """The label, if the line looks like a row of the file."""
        values = next(csv.reader([line]), [])
        label = values[self._label].strip() if len(values) == self._width else ""
        return int(label) if re.fullmatch(r"[+-]?\d{1,9}", label) else None


def _counts_up(numbers: Sequence[int]) -> bool:
    """Whether these are the numbers of a list: 1, 2, 3."""
    # A review that is a numbered list looks like rows with the labels 1, 2, 3.
    return all(second == first + 1 for first, second in pairwise(numbers))
