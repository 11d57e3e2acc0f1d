"""The reviews of a table in three parts: to train on, to choose the best epoch by, and to test with once.

    as they lie -> the same review once -> drawn evenly by a hash of (seed, text) -> test | valid | train

Nearly every embedded review stands in its file twice. Were rows drawn, nine in ten of the test would have been seen in
training: a linear model on pairs of characters then has an F1 of 0.93, and 0.84 where the copies of a text stay in one
part. So a text is in one part by construction, whatever becomes of its copies.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import DataError
from lockstep.recipes.reviews.table import Review, ReviewTable

Part = Literal["train", "valid", "test"]
_MOST_CLASSES = 20


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a table is divided.

    Args:
        test_share: part of each class for the test.
        valid_share: part of each class that chooses the best epoch.
        keep_repeated: whether copies of a review are kept.
        limit: most reviews; 0 is all.
        seed: another one gives other parts.
    """

    test_share: float
    valid_share: float
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
        test, valid = (max(1, round(share * len(texts))) for share in (how.test_share, how.valid_share))
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
