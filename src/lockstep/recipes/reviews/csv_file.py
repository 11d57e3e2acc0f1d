"""Reads reviews from a CSV file with the columns label and review; what cannot be read is named with its line.

A row without a review is dropped and counted. All else that is wrong ends the reading.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.recipes.reviews.table import Review, ReviewTable

LABEL, REVIEW = "label", "review"
_OTHER_ENCODINGS = ("utf-8", "gb18030", "big5", "utf-16")
_SHOWN = 8  # columns that a message lists


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The fields of a row and the line where it begins, from 1."""

    line: int
    fields: Sequence[str]


def read_csv(path: Path, *, encoding: str = "utf-8", separator: str = ",") -> ReviewTable:
    """The reviews of a file, in its order. Other columns are passed over.

    Args:
        path: the file; its first row has the names of the columns.
        encoding: of the file, as Python calls it.
        separator: between columns, one character.

    Raises:
        DataError: there is no such file, or it cannot be used; the line is named where there is one.
    """
    name = str(path)
    rows = _rows(_decoded(_bytes(path), name, encoding), name, separator)
    header = next(rows, None)
    if header is None:
        raise DataError(f"{name!r} is empty, expected a CSV file with the columns {LABEL} and {REVIEW}")
    label, review = _columns(header, name)
    reviews: list[Review] = []
    empty = 0
    for row in rows:
        if len(row.fields) > len(header.fields):
            raise DataError(
                f"{name!r}, line {row.line}: {len(row.fields)} values for {len(header.fields)} columns; put a review"
                ' that has a separator in it between quotes ("")'
            )
        text = row.fields[review].strip() if review < len(row.fields) else ""
        if text:
            reviews.append(Review(text=text, label=_label(row, label, name)))
        else:
            empty += 1
    if not reviews:
        raise DataError(f"{name!r} holds no review: {empty} rows, none with a text in the column {REVIEW}")
    return ReviewTable(reviews=tuple(reviews), empty=empty, source=name)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"the review file {str(path)!r} does not exist; give the path of a CSV file, or leave it out for the"
            " embedded reviews"
        ) from None
    except IsADirectoryError:
        raise DataError(f"{str(path)!r} is a folder, expected a CSV file") from None
    except PermissionError:
        raise DataError(f"{str(path)!r} cannot be read (permission denied)") from None


def _decoded(content: bytes, name: str, encoding: str) -> str:
    """The text, without a byte order mark."""
    try:
        text = content.decode(encoding)
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        line = content.count(b"\n", 0, start) + 1
        raise DataError(
            f"{name!r} is not {encoding}: byte {start} (0x{content[start]:02x}, line {line}) does not belong there;"
            f" {_advice(content, encoding)}"
        ) from None
    return text.removeprefix("\ufeff")


def _advice(content: bytes, encoding: str) -> str:
    """Which encoding would do: GB18030 holds GBK and GB2312, in which Chinese spreadsheets are saved."""
    readable = [other for other in _OTHER_ENCODINGS if other != encoding and _decodes(content, other)]
    return f"it can be read as {readable[0]}: give --encoding {readable[0]}" if readable else "give its --encoding"


def _decodes(content: bytes, encoding: str) -> bool:
    if encoding == "utf-16" and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False  # almost any bytes of even number would do
    try:
        content.decode(encoding)
    except UnicodeError:
        return False
    return True


def _rows(text: str, name: str, separator: str) -> Iterator[_Row]:
    """All rows but blank lines, which CSV passes over."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield _Row(line=line, fields=fields)
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name!r}, line {line}: {error}; expected CSV: is a quote that opens there never closed?"
        ) from None


def _columns(header: _Row, name: str) -> tuple[int, int]:
    """Where label and review stand."""
    found = [field.strip() for field in header.fields]
    missing = [column for column in (LABEL, REVIEW) if column not in found]
    if missing:
        listed = ", ".join(repr(column[:40]) for column in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise DataError(
            f"{name!r} has no column {' and no column '.join(missing)}; its first line has {listed}{more}; expected"
            f" {LABEL} and {REVIEW}, separated by what --separator says"
        )
    return found.index(LABEL), found.index(REVIEW)


def _label(row: _Row, column: int, name: str) -> int:
    given = row.fields[column].strip() if column < len(row.fields) else ""
    try:
        number = float(given)
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise DataError(
        f"{name!r}, line {row.line}: the label {given[:40]!r} is no whole number, expected one for each class, such as"
        " 0 for bad and 1 for good"
    )
