"""Reviews as a source has them, each with its label: what the readers give and ``parts`` divides."""

from __future__ import annotations

from dataclasses import dataclass


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
