"""The images of a run, decoded and labelled, in three splits; and a summary of them without training."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.folder import (
    DIGIT_CLASSES,
    Split,
    Splits,
    complete_splits,
    read_digits,
    scan_folder,
)
from lockstep.recipes.images.pixels import (
    PixelStore,
    Progress,
    decode_to_disk,
    decode_to_memory,
    inspect_file,
    map_in_workers,
    to_square,
)

_MAX_NAMED = 3  # broken images that a message names


@dataclass(frozen=True, kw_only=True)
class BrokenImage:
    """A file that cannot be decoded, and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """One split without the broken images: their rows in the array of pixels, and their labels."""

    rows: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Decoded images.

    Args:
        store: the pixels of all images.
        splits: rows and labels of each split; "valid" may be empty.
        classes: names of the classes, in the order of the labels.
        broken: the images that are skipped.
        source: where the images come from, for a person to read.
    """

    store: PixelStore
    splits: Mapping[Split, LabelledRows]
    classes: tuple[str, ...]
    broken: tuple[BrokenImage, ...]
    source: str


def load_images(config: ImagesConfig, *, progress: Progress | None = None) -> ImageDataset:
    """Reads and decodes the images of the config, or the embedded digits.

    Args:
        config: the configuration of the run.
        progress: called with the number of decoded files and of all files.

    Raises:
        DataError: the images cannot be used, or too many of them are broken.
    """
    if config.data is None:
        return _load_digits(config)
    folder = scan_folder(config.data.expanduser())
    for what in folder.ignored:
        warnings.warn(f"ignored: {what}", stacklevel=3)
    splits = _splits(config, folder.splits)
    # In the order of the folder, not of the splits: with other fractions the cached pixels are still valid.
    paths = [image.path for images in folder.splits.values() for image in images]
    if config.cache == "memory":
        store = decode_to_memory(paths, size=config.size, workers=config.num_workers, progress=progress)
    else:
        store = decode_to_disk(
            paths,
            root=folder.root,
            size=config.size,
            workers=config.num_workers,
            cache_dir=config.cache_dir.expanduser(),
            progress=progress,
        )
    broken = tuple(BrokenImage(path=paths[row], reason=reason) for row, reason in store.broken.items())
    _check_broken(broken, len(paths), config.max_broken)
    labelled = _labelled(splits, paths, store)
    _check_remaining(labelled, folder.classes)
    return ImageDataset(
        store=store, splits=labelled, classes=folder.classes, broken=broken, source=str(config.data.expanduser())
    )


def _load_digits(config: ImagesConfig) -> ImageDataset:
    digits = read_digits()
    pixels = [to_square(image, config.size) for image in digits.images.values()]
    store = PixelStore(pixels=require("numpy", "images").stack(pixels), broken={})
    return ImageDataset(
        store=store,
        splits=_labelled(_splits(config, digits.splits), list(digits.images), store),
        classes=DIGIT_CLASSES,
        broken=(),
        source="scikit-learn's digits",
    )


def _splits(config: ImagesConfig, splits: Splits) -> Splits:
    """All three splits; warns of a fraction that has no effect because the data has the split."""
    for split, fraction, default in (
        ("valid", config.valid_fraction, ImagesConfig.valid_fraction),
        ("test", config.test_fraction, ImagesConfig.test_fraction),
    ):
        if split in splits and fraction != default:
            warnings.warn(f"{split}_fraction={fraction:g} has no effect: the images have a {split} split", stacklevel=4)
    return complete_splits(splits, valid_fraction=config.valid_fraction, test_fraction=config.test_fraction)


def _labelled(splits: Splits, paths: Sequence[Path], store: PixelStore) -> dict[Split, LabelledRows]:
    rows = {path: row for row, path in enumerate(paths) if row not in store.broken}
    readable = {split: [image for image in images if image.path in rows] for split, images in splits.items()}
    return {
        split: LabelledRows(
            rows=tuple(rows[image.path] for image in images), labels=tuple(image.label for image in images)
        )
        for split, images in readable.items()
    }


def _check_broken(broken: Sequence[BrokenImage], images: int, max_broken: float) -> None:
    if not broken:
        return
    named = ", ".join(f"{str(image.path)!r} ({image.reason})" for image in broken[:_MAX_NAMED])
    more = f" and {len(broken) - _MAX_NAMED:,} more" if len(broken) > _MAX_NAMED else ""
    message = f"{len(broken):,} of {images:,} images cannot be read: {named}{more}"
    if len(broken) > max_broken * images:
        raise DataError(
            f"{message}; expected at most {max_broken:.3g} of them (max_broken); repair or remove them, or raise"
            " max_broken"
        )
    warnings.warn(f"{message}; they are skipped", stacklevel=4)


def _check_remaining(splits: Mapping[Split, LabelledRows], classes: Sequence[str]) -> None:
    """Checks that a class or the test split does not consist of broken images only."""
    gone = sorted(set(range(len(classes))) - set(splits["train"].labels))
    if gone:
        names = ", ".join(repr(classes[label]) for label in gone)
        raise DataError(f"no readable training image is left of the class {names}, expected at least one; repair some")
    if not splits["test"].rows:
        raise DataError(
            "no image is left for the test, expected at least one; add images: a class needs two to hold out one"
        )


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
        broken: images that cannot be decoded.
        ignored: what was found and is not used, for a person to read.
    """

    source: str
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    rule: str
    sizes: Mapping[Size, int]
    broken: tuple[BrokenImage, ...]
    ignored: tuple[str, ...]

    @property
    def num_images(self) -> int:
        """The number of images in all splits."""
        return sum(map(sum, self.counts.values()))


def summarize_images(config: ImagesConfig, *, progress: Progress | None = None) -> ImageSummary:
    """Finds the images of the config, or the embedded digits, and decodes each once.

    Args:
        config: names the folder and the fractions to hold out.
        progress: called with the number of read files and of all files.

    Raises:
        DataError: a run could not use the images.
    """
    sizes: Counter[Size] = Counter()
    broken: list[BrokenImage] = []
    ignored: tuple[str, ...] = ()
    if config.data is None:
        digits = read_digits()
        source, classes, given = "scikit-learn's digits", DIGIT_CLASSES, digits.splits
        sizes.update(image.size for image in digits.images.values())
    else:
        folder = scan_folder(config.data.expanduser())
        source, classes, given, ignored = str(folder.root), folder.classes, folder.splits, folder.ignored
        paths = [image.path for images in given.values() for image in images]
        with closing(map_in_workers(inspect_file, paths, workers=config.num_workers)) as results:
            for number, (path, result) in enumerate(zip(paths, results, strict=True), start=1):
                if isinstance(result, str):
                    broken.append(BrokenImage(path=path, reason=result))
                else:
                    sizes[result] += 1
                if progress is not None:
                    progress(number, len(paths))
    labels = {split: Counter(image.label for image in images) for split, images in _splits(config, given).items()}
    return ImageSummary(
        source=source,
        classes=classes,
        counts={split: tuple(count[label] for label in range(len(classes))) for split, count in labels.items()},
        rule=_rule(config, frozenset(given)),
        sizes=sizes,
        broken=tuple(broken),
        ignored=ignored,
    )


def _rule(config: ImagesConfig, given: frozenset[str]) -> str:
    fractions = {"test": config.test_fraction, "valid": config.valid_fraction}
    held_out = [f"{split} ({value:.3g})" for split, value in fractions.items() if value and split not in given]
    if not held_out:
        return "the splits are those of the data"
    return f"held out of the training split, by the hash of an image's name within each class: {', '.join(held_out)}"
