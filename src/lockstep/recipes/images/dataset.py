"""The images of a run, decoded and labelled, in three splits; and a summary of them without training."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images import pixels
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.folder import FoundImages, Split, Splits, complete_splits, read_digits, scan_folder

_MAX_NAMED = 3  # broken images that a message names


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """One split without the broken images: their rows in the array of pixels, and their labels."""

    rows: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Decoded images: rows and labels of each split ("valid" may be empty), and which images are broken, and why."""

    store: pixels.PixelStore
    splits: Mapping[Split, LabelledRows]
    classes: tuple[str, ...]
    broken: Mapping[Path, str]
    source: str


def load_images(config: ImagesConfig, *, progress: pixels.Progress | None = None) -> ImageDataset:
    """Reads and decodes the images of the config, or the embedded digits.

    Raises:
        DataError: the images cannot be used, or too many of them are broken.
    """
    found = _find_images(config)
    for what in found.ignored:
        warnings.warn(f"ignored: {what}", stacklevel=3)
    splits, paths = _splits(config, found.splits), found.paths
    store = _decode(config, found, progress)
    broken = {paths[row]: reason for row, reason in store.broken.items()}
    _check_broken(broken, len(paths), config.max_broken)
    rows = {path: row for row, path in enumerate(paths) if path not in broken}
    readable = {split: [image for image in images if image.path in rows] for split, images in splits.items()}
    gone = sorted(set(range(len(found.classes))) - {image.label for image in readable["train"]})
    if gone:
        names = ", ".join(repr(found.classes[label]) for label in gone)
        raise DataError(f"no readable training image is left of the class {names}, expected at least one; repair some")
    if not readable["test"]:
        raise DataError(
            "no image is left for the test, expected at least one; add images: a class needs two to hold out one"
        )
    labelled = {
        split: LabelledRows(rows=tuple(rows[each.path] for each in images), labels=tuple(each.label for each in images))
        for split, images in readable.items()
    }
    return ImageDataset(store=store, splits=labelled, classes=found.classes, broken=broken, source=found.source)


def _find_images(config: ImagesConfig) -> FoundImages:
    return read_digits() if config.data is None else scan_folder(config.data.expanduser())


def _splits(config: ImagesConfig, splits: Splits) -> Splits:
    """All three splits; warns of a fraction that has no effect because the data has the split."""
    for split, fraction, default in (
        ("valid", config.valid_fraction, ImagesConfig.valid_fraction),
        ("test", config.test_fraction, ImagesConfig.test_fraction),
    ):
        if split in splits and fraction != default:
            warnings.warn(f"{split}_fraction={fraction:g} has no effect: the images have a {split} split", stacklevel=4)
    return complete_splits(splits, valid_fraction=config.valid_fraction, test_fraction=config.test_fraction)


def _decode(config: ImagesConfig, found: FoundImages, progress: pixels.Progress | None) -> pixels.PixelStore:
    if found.embedded:
        squares = [pixels.to_square(found.embedded[path], config.size) for path in found.paths]
        return pixels.PixelStore(pixels=require("numpy", "images").stack(squares), broken={})
    how = {"size": config.size, "workers": config.num_workers}
    if config.cache == "memory":
        return pixels.decode_to_memory(found.paths, progress=progress, **how)
    folder = config.cache_dir.expanduser()
    return pixels.decode_to_disk(found.paths, root=found.root, cache_dir=folder, progress=progress, **how)


def _check_broken(broken: Mapping[Path, str], images: int, max_broken: float) -> None:
    if not broken:
        return
    named = ", ".join(f"{str(path)!r} ({reason})" for path, reason in list(broken.items())[:_MAX_NAMED])
    more = f" and {len(broken) - _MAX_NAMED:,} more" if len(broken) > _MAX_NAMED else ""
    message = f"{len(broken):,} of {images:,} images cannot be read: {named}{more}"
    if len(broken) > max_broken * images:
        raise DataError(
            f"{message}; expected at most {max_broken:.3g} of them (max_broken); repair or remove them, or raise"
            " max_broken"
        )
    warnings.warn(f"{message}; they are skipped", stacklevel=4)


Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ImageSummary:
    """What ``lockstep data images`` shows.

    Args:
        source: where the images are, for a person to read.
        classes: names of the classes, sorted.
        counts: split -> number of images of each class, broken ones included.
        rule: how the images were split, for a person to read.
        sizes: (width, height) in pixels as stored -> number of images of that size.
        broken: path of an image that cannot be decoded -> the reason.
        ignored: what was found and is not used, for a person to read.
    """

    source: str
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    rule: str
    sizes: Mapping[Size, int]
    broken: Mapping[Path, str]
    ignored: tuple[str, ...]

    @property
    def num_images(self) -> int:
        """The number of images in all splits."""
        return sum(map(sum, self.counts.values()))


def summarize_images(config: ImagesConfig, *, progress: pixels.Progress | None = None) -> ImageSummary:
    """Finds the images of the config, or the embedded digits, and decodes each once.

    Raises:
        DataError: a run could not use the images.
    """
    found = _find_images(config)
    sizes: Counter[Size] = Counter(image.size for image in found.embedded.values())
    paths = [] if found.embedded else found.paths
    broken: dict[Path, str] = {}
    with closing(pixels.map_in_workers(pixels.inspect_file, paths, workers=config.num_workers)) as results:
        for number, (path, result) in enumerate(zip(paths, results, strict=True), start=1):
            if isinstance(result, str):
                broken[path] = result
            else:
                sizes[result] += 1
            if progress is not None:
                progress(number, len(paths))
    labels = {split: Counter(each.label for each in images) for split, images in _splits(config, found.splits).items()}
    fractions = {"test": config.test_fraction, "valid": config.valid_fraction}
    held_out = [f"{split} ({value:.3g})" for split, value in fractions.items() if value and split not in found.splits]
    rule = "held out of the training split, by the hash of an image's name within each class: "
    return ImageSummary(
        source=found.source,
        classes=found.classes,
        counts={split: tuple(count[label] for label in range(len(found.classes))) for split, count in labels.items()},
        rule=f"{rule}{', '.join(held_out)}" if held_out else "the splits are those of the data",
        sizes=sizes,
        broken=broken,
        ignored=found.ignored,
    )
