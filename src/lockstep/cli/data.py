"""``lockstep data``: shows the data of a recipe without training, or writes the embedded digits as files."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.app import COMMANDS
from lockstep.cli.flags import Nested, command
from lockstep.extras import require
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.dataset import ImageSummary, summarize_images
from lockstep.recipes.images.folder import write_digits
from lockstep.recipes.images.pixels import Progress, format_bytes
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.train import read_text
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.dataset import Review, ReviewSplits, ReviewTable, read_table, split_reviews
from lockstep.recipes.reviews.task import class_names
from lockstep.recipes.text.corpus import TextSplits
from lockstep.report import text_table

_MAX_BROKEN_SHOWN = 10
_PUBLISHED_SIZE = 224
_REVIEW_WIDTH = 40  # characters; Chinese ones are two columns wide


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep data`` and its commands."""
    data = typer.Typer()
    data.callback()(_data_help)
    held_out = ("data", "test_fraction", "valid_fraction")
    text = Nested(kind=MlmConfig, only=("data", "min_characters"))
    data.command("mlm", epilog="Example: lockstep data mlm --data wikitext-2 --lines 3")(command(DataMlm, config=text))
    images = Nested(kind=ImagesConfig, only=(*held_out, "workers"))
    data.command("images", epilog="Example: lockstep data images --data flower_photos")(
        command(DataImages, config=images)
    )
    table = Nested(kind=ReviewsConfig, only=(*held_out, "encoding", "separator", "names", "repeated", "limit", "seed"))
    data.command("reviews", epilog="Example: lockstep data reviews --data hotel.csv --encoding gb18030")(
        command(DataReviews, config=table)
    )
    data.command("digits", epilog="Example: lockstep data digits digits")(command(DataDigits))
    app.add_typer(data, name="data", help=COMMANDS["data"], epilog="Example: lockstep data mlm")


def _data_help() -> None:
    """Show the data of a recipe, or write the embedded digits."""


@dataclass(frozen=True, kw_only=True)
class DataMlm:
    """Show the text of the recipe mlm: lines, words and characters of each split, and its first lines.

    Args:
        lines: number of first lines of each split to show.
    """

    lines: Annotated[int, typer.Option(min=0)] = 2
    config: MlmConfig

    def __call__(self) -> int:
        """Prints the text's summary."""
        print(text_summary(read_text(self.config), lines=self.lines))
        return 0


def text_summary(text: TextSplits, *, lines: int) -> str:
    """The source, a table of the splits, and the first lines of each, shortened to one line of a terminal."""
    rows, first = [], []
    for name, found in (("train", text.train), ("valid", text.valid), ("test", text.test)):
        counts = len(found), sum(len(line.split()) for line in found), sum(map(len, found))
        rows.append([name, *(f"{count:,}" for count in counts)])
        first += [f"{name:<6}{textwrap.shorten(line, width=100, placeholder=' ...')}" for line in found[:lines]]
    table = text_table(["split", "lines", "words", "characters"], rows)
    return "\n\n".join([f"text: {text.source}", table, "\n".join(first)]).rstrip()


@dataclass(frozen=True, kw_only=True)
class DataImages:
    """Show the images of the recipe images: classes, counts, sizes, and which of them are broken."""

    config: ImagesConfig

    def __call__(self) -> int:
        """Prints the images' summary."""
        with decoding_bar(quiet=False) as progress:
            summary = summarize_images(self.config, progress=progress)
        print(images_summary(summary))
        return 0


@dataclass(frozen=True, kw_only=True)
class DataDigits:
    """Write scikit-learn's digits as PNG files: DIR/train/0 ... 9 and DIR/test/0 ... 9.

    Args:
        folder: a new or an empty folder.
    """

    folder: Annotated[Path, typer.Argument(metavar="DIR")]

    def __call__(self) -> int:
        """Writes the digits."""
        written = write_digits(self.folder.expanduser())
        counts = ", ".join(f"{split} {number:,}" for split, number in written.items())
        train = f"lockstep train images --data {self.folder}"
        print(f"digits written to {self.folder}: {counts}; train on them with: {train}")
        return 0


@contextmanager
def decoding_bar(*, quiet: bool) -> Iterator[Progress | None]:
    """Shows a progress bar at a terminal while images are decoded; yields what updates it, or None."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with require("tqdm", "train").tqdm(desc="decoding", unit=" images", leave=False, file=sys.stderr) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        yield progress


def images_summary(summary: ImageSummary) -> str:
    """The source, a table of classes and splits, the sizes, and the broken images."""
    splits, broken = list(summary.counts), summary.broken
    rows = [[name, *(f"{summary.counts[split][n]:,}" for split in splits)] for n, name in enumerate(summary.classes)]
    total = ["all", *(f"{sum(summary.counts[split]):,}" for split in splits)]
    facts = [f"splits  {summary.rule}"]
    if summary.sizes:
        named = {size: f"{size[0]}x{size[1]}" for size in summary.sizes}
        by_area = sorted(named, key=lambda size: (size[0] * size[1], size))
        (common, number), *_ = Counter(summary.sizes).most_common(1)
        most = f", most often {named[common]} ({number:,})" if len(named) > 1 else ""
        facts.append(f"sizes   from {named[by_area[0]]} to {named[by_area[-1]]}{most}")
    decoded = summary.num_images * _PUBLISHED_SIZE * _PUBLISHED_SIZE * 3
    at_published = f"{format_bytes(decoded)} at {_PUBLISHED_SIZE}x{_PUBLISHED_SIZE}"
    facts.append(f"decoded {at_published}, {format_bytes(decoded // 49)} at 32x32")
    facts += [f"ignored {what}" for what in summary.ignored]
    share = len(broken) / summary.num_images
    facts.append(f"broken  {len(broken):,} of {summary.num_images:,} images ({share:.2%})")
    shown = [f"broken  {path} ({reason})" for path, reason in list(broken.items())[:_MAX_BROKEN_SHOWN]]
    if len(broken) > len(shown):
        shown.append(f"broken  and {len(broken) - len(shown):,} more")
    blocks = [f"images: {summary.source}", text_table(["class", *splits], [*rows, total]), "\n".join(facts)]
    return "\n\n".join([*blocks, "\n".join(shown)]).rstrip()


@dataclass(frozen=True, kw_only=True)
class DataReviews:
    """Show the reviews of the recipe reviews: how many of each class, empty or repeated, and the first of them.

    Args:
        lines: number of first reviews of each split to show.
    """

    lines: Annotated[int, typer.Option(min=0)] = 2
    config: ReviewsConfig

    def __call__(self) -> int:
        """Prints the reviews' summary."""
        table = read_table(self.config)
        splits = split_reviews(table, self.config)
        names = class_names(self.config, splits.labels)
        print(f"{reviews_overview(table, splits, names)}\n\n{reviews_table(splits)}")
        if first := first_reviews(splits, self.lines):
            print(f"\n{first}")
        return 0


def reviews_overview(table: ReviewTable, splits: ReviewSplits, names: Sequence[str]) -> str:
    """What was read, what was dropped, how it was split, and what the labels mean."""
    dropped = [f"{table.empty:,} empty"] + [f"{splits.repeated:,} repeated"] * bool(splits.repeated)
    both = f"; {splits.contradictory:,} have more than one label" if splits.contradictory else ""
    train, valid, test = (f"{split} {len(found):,}" for split, found in splits.by_name.items())
    labels = ", ".join(f"{label} is {name}" for label, name in zip(splits.labels, names, strict=True))
    return "\n".join(
        [
            f"data    {table.source}: {len(table.reviews) + table.empty:,} rows; dropped: {', '.join(dropped)}{both}",
            f"splits  {train}, {valid} (chooses the best epoch), {test}",
            f"labels  {labels}",
        ]
    )


def reviews_table(splits: ReviewSplits) -> str:
    """A row for each split, a column for each class, and the lengths of its reviews."""

    def row(split: str, found: Sequence[Review]) -> list[str]:
        of_label = Counter(review.label for review in found)
        lengths = [len(review.text) for review in found]
        counts = [len(found), *(of_label[label] for label in splits.labels), sum(lengths), max(lengths)]
        return [split, *(f"{count:,}" for count in counts)]

    headings = ["split", "reviews", *(f"label {label}" for label in splits.labels), "characters", "longest"]
    return text_table(headings, [row(split, found) for split, found in splits.by_name.items()])


def first_reviews(splits: ReviewSplits, lines: int) -> str:
    """The first reviews of each split, shortened to one line of a terminal."""
    shown = []
    for split, found in splits.by_name.items():
        for review in found[:lines]:
            text = " ".join(review.text.split())
            short = text if len(text) <= _REVIEW_WIDTH else f"{text[:_REVIEW_WIDTH]}…"
            shown.append(f"{split:<6}{review.label:>3}  {short}")
    return "\n".join(shown)
