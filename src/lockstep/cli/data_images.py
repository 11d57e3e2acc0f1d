"""``lockstep data images`` and ``lockstep data digits``: what pictures there are, and the embedded ones as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.decoding import decoding_bar
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.dataset import ImageSummary, summarize_images
from lockstep.recipes.images.folder import write_digits
from lockstep.recipes.images.pixels import format_bytes
from lockstep.report import text_table

_BROKEN_SHOWN = 10
_SIDE = 224

DataFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A folder with one folder of pictures for each class, or with train/ and test/ of such folders. Without"
        " it: scikit-learn's digits.",
        show_default=False,
    ),
]
WorkersFlag = Annotated[
    int | None, typer.Option(help="Processes that decode; by default one for each core.", show_default=False)
]
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")]


def images(*, data: DataFlag = None, workers: WorkersFlag = None) -> Callable[[], int]:
    """Say what the pictures of the recipe images are: classes, counts, sizes, and which of them are broken."""
    config = ImagesConfig(data=data, workers=workers)

    def job() -> int:
        with decoding_bar(quiet=False) as progress:
            summary = summarize_images(config, progress=progress)
        print(describe_pictures(summary))
        return 0

    return job


def digits(*, folder: FolderArgument) -> Callable[[], int]:
    """Write scikit-learn's digits as PNG files: DIR/train/0 ... 9 and DIR/test/0 ... 9."""

    def job() -> int:
        written = write_digits(folder.expanduser())
        counts = ", ".join(f"{part} {number:,}" for part, number in written.items())
        print(f"digits written to {folder}: {counts}; train on them with: lockstep train images --data {folder}")
        return 0

    return job


def describe_pictures(summary: ImageSummary) -> str:
    """The source, a table of classes and parts, the sizes, and the broken pictures by name."""
    names = list(summary.counts)
    rows = [
        [name, *(f"{summary.counts[part][label]:,}" for part in names)] for label, name in enumerate(summary.classes)
    ]
    total = ["all", *(f"{sum(summary.counts[part]):,}" for part in names)]
    lines = [f"pictures: {summary.source}", text_table(["class", *names], [*rows, total]), _facts(summary)]
    if summary.broken:
        shown = [f"broken  {one.path} ({one.reason})" for one in summary.broken[:_BROKEN_SHOWN]]
        more = len(summary.broken) - _BROKEN_SHOWN
        lines.append("\n".join([*shown, *([f"broken  and {more:,} more"] if more > 0 else [])]))
    return "\n\n".join(lines)


def _facts(summary: ImageSummary) -> str:
    sizes = Counter(summary.sizes)
    facts = [f"parts   {summary.rule}"]
    if sizes:
        by_area = sorted(sizes, key=lambda size: (size[0] * size[1], size))
        (common, number), *_ = sizes.most_common(1)
        most = f", most often {_size(common)} ({number:,})" if len(sizes) > 1 else ""
        facts.append(f"sizes   from {_size(by_area[0])} to {_size(by_area[-1])}{most}")
    decoded = summary.num_images * _SIDE * _SIDE * 3
    facts.append(f"decoded {format_bytes(decoded)} at {_SIDE}x{_SIDE}, {format_bytes(decoded // 49)} at 32x32")
    facts += [f"besides {what}" for what in summary.ignored]
    share = len(summary.broken) / summary.num_images
    return "\n".join([*facts, f"broken  {len(summary.broken):,} of {summary.num_images:,} pictures ({share:.2%})"])


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
