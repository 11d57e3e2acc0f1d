"""``lockstep data reviews``: what a file of reviews holds, and how the recipe divides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.dataset import Review, ReviewSplits, ReviewTable
from lockstep.recipes.reviews.train import class_names, read_table, split_table
from lockstep.report import text_table

CsvFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A CSV file with the columns label and review. Without it: the embedded reviews.",
        show_default=False,
    ),
]
EncodingFlag = Annotated[str, typer.Option(help="Of the file, as Python calls it, such as gb18030.")]
SeparatorFlag = Annotated[str, typer.Option(help="Between the columns of the file; tab is one too.")]
LinesFlag = Annotated[int, typer.Option(min=0, help="How many first reviews of each part to show.")]

_SHOWN = 40


def reviews(
    *, csv: CsvFlag = None, encoding: EncodingFlag = "utf-8", separator: SeparatorFlag = ",", lines: LinesFlag = 2
) -> Callable[[], int]:
    """Say what the reviews of the recipe reviews are: how many of which class, dropped or repeated, and the first."""
    config = ReviewsConfig(csv=csv, encoding=encoding, separator=separator)

    def job() -> int:
        table = read_table(config)
        parts = split_table(config, table)
        names = class_names(config, parts.labels)
        print(f"{data_lines(table, parts, names)}\n\n{describe_parts(parts)}")
        if first := first_reviews(parts, lines):
            print(f"\n{first}")
        return 0

    return job


def data_lines(table: ReviewTable, parts: ReviewSplits, names: Sequence[str]) -> str:
    """What was read, what was dropped of it, how it was divided, and what the labels mean."""
    dropped = [f"{table.empty:,} empty"] + [f"{parts.repeated:,} repeated"] * bool(parts.repeated)
    both = f"; {parts.contradictory:,} stand under more than one label" if parts.contradictory else ""
    train, valid, test = (f"{part} {len(reviews):,}" for part, reviews in parts.by_name.items())
    labels = ", ".join(f"{label} is {name}" for label, name in zip(parts.labels, names, strict=True))
    return "\n".join(
        [
            f"data    {table.source}: {len(table.reviews) + table.empty:,} rows; dropped: {', '.join(dropped)}{both}",
            f"parts   {train}, {valid} (chooses the best epoch), {test}",
            f"labels  {labels}",
        ]
    )


def describe_parts(parts: ReviewSplits) -> str:
    """A table: a row a part, a column for each class, and how long its reviews are."""
    headings = ["part", "reviews", *(f"label {label}" for label in parts.labels), "characters", "longest"]
    return text_table(headings, [_row(part, reviews, parts.labels) for part, reviews in parts.by_name.items()])


def first_reviews(parts: ReviewSplits, lines: int) -> str:
    """The first reviews of each part, cut to one line of a terminal."""
    shown = [(part, review) for part, reviews in parts.by_name.items() for review in reviews[:lines]]
    return "\n".join(f"{part:<6}{review.label:>3}  {_cut(review.text)}" for part, review in shown)


def _row(part: str, reviews: Sequence[Review], labels: Sequence[int]) -> list[str]:
    of_label = Counter(review.label for review in reviews)
    lengths = [len(review.text) for review in reviews]
    counts = [len(reviews), *(of_label[label] for label in labels), sum(lengths), max(lengths)]
    return [part, *(f"{count:,}" for count in counts)]


def _cut(text: str) -> str:
    """The first 40 characters: Chinese ones are two columns wide."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
