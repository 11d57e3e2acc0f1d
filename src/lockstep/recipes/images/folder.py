"""Finding labelled images, without decoding any: in a tree of class folders, or scikit-learn's handwritten digits.

    DIR/CLASS/*.jpg                                 one tree, from which validation and test images are held out
    DIR/train/CLASS/*.jpg, DIR/test/CLASS/*.jpg     split already; DIR/valid may be there too

DIR may also hold the tree one level deeper. Other files (LICENSE.txt, Thumbs.db) and hidden files are ignored.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.pixels import FORMATS

Split = Literal["train", "valid", "test"]

_SPLIT_NAMES: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
}
_MAX_DEPTH = 4  # levels of folders with one folder each that are skipped


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An image and the index of its class among the sorted classes.

    ``name`` is its path below the split's folder, such as "Cat/12.jpg": the same wherever the tree is.
    """

    name: str
    label: int
    path: Path = Path()


Splits = Mapping[Split, tuple[ImageFile, ...]]


@dataclass(frozen=True, kw_only=True)
class FoundImages:
    """Labelled images.

    Args:
        source: where they are, for a person to read.
        root: the folder that holds the classes, or the splits.
        classes: names of the classes of the training split, sorted.
        splits: the images of each split, by class and name; only "train" if the tree is not split.
        ignored: what was found and is not used, for a person to read.
        embedded: path -> Pillow image, of images that are not files.
    """

    source: str
    root: Path
    classes: tuple[str, ...]
    splits: Splits
    ignored: tuple[str, ...] = ()
    embedded: Mapping[Path, Any] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        """The paths of all images: in the order of the folder, whatever is held out later."""
        return [image.path for images in self.splits.values() for image in images]


def scan_folder(folder: Path) -> FoundImages:
    """Finds classes, splits and images.

    Raises:
        DataError: the folder is missing or unreadable, has fewer than two class folders or an empty one, or a split has
            a class that the training split does not have.
    """
    root = _find_root(folder)
    folders, ignored = _find_splits(root)
    found = {split: _images_by_class(path) for split, path in folders.items()}
    classes = tuple(sorted(found["train"]))
    if len(classes) == 1:
        raise DataError(
            f"the image folder {str(folders['train'])!r} has one class folder, {classes[0]!r}, expected at least two;"
            " put the images of each class into a folder of their own"
        )
    for split, by_class in found.items():
        if unknown := sorted(set(by_class) - set(classes)):
            raise DataError(
                f"the image folder {str(folders[split])!r} has {_count(len(unknown), 'class', 'classes')} that the"
                f" training split {str(folders['train'])!r} does not have: {_shortened(unknown)}; expected some of"
                f" {_shortened(classes)}; rename or remove the folder"
            )
    splits = {
        split: tuple(
            ImageFile(name=path.relative_to(folders[split]).as_posix(), label=label, path=path)
            for label, name in enumerate(classes)
            for path in by_class.get(name, ())
        )
        for split, by_class in found.items()
    }
    outside = {path: len(_images_in(path)) for path in folders.values()}
    ignored += [
        f"{_count(n, 'image')} in {str(path)!r} outside of the class folders" for path, n in outside.items() if n
    ]
    return FoundImages(source=str(folder), root=root, classes=classes, splits=splits, ignored=tuple(ignored))


def _find_root(folder: Path) -> Path:
    """The folder of the classes or splits: ``folder``, or below it, past folders that hold only one folder."""
    if not folder.is_dir():
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise DataError(
            f"the image folder {str(folder)!r} {what}; expected a folder with one folder of images for each class;"
            " correct --data, or leave it out for the embedded digits"
        )
    root = folder
    for _ in range(_MAX_DEPTH):
        inside = _folders_in(root)
        if len(inside) != 1 or _images_in(root) or not _folders_in(inside[0]):
            break
        root = inside[0]
    return root


def _find_splits(root: Path) -> tuple[dict[Split, Path], list[str]]:
    """Split -> its folder, and what is ignored. A folder "train" of folders is a split, one of images is a class."""
    inside = _folders_in(root)
    named = [path for path in inside if path.name.lower() in _SPLIT_NAMES]
    if not any(_SPLIT_NAMES[path.name.lower()] == "train" and _folders_in(path) for path in named):
        return {"train": root}, []
    splits: dict[Split, Path] = {}
    for path in named:
        split = _SPLIT_NAMES[path.name.lower()]
        if split in splits:
            raise DataError(
                f"the image folder {str(root)!r} holds {splits[split].name!r} and {path.name!r}, which both mean the"
                f" split {split!r}; rename or remove one of them"
            )
        splits[split] = path
    return splits, [f"the folder {str(path)!r}, which is not a split" for path in inside if path not in named]


def _images_by_class(split: Path) -> dict[str, list[Path]]:
    found = {path.name: _images_below(path) for path in _folders_in(split)}
    if not any(found.values()):
        outside = len(_images_in(split))
        what = f"{outside} images outside of class folders" if outside else "no images"
        formats = ", ".join(sorted(suffix[1:] for suffix in FORMATS))
        raise DataError(
            f"the image folder {str(split)!r} holds {what}, expected a folder of images ({formats}) for each class"
        )
    if empty := [str(split / name) for name, images in found.items() if not images]:
        raise DataError(
            f"{_count(len(empty), 'class folder')} without an image: {_shortened(empty)}; expected at least one image"
            " in each; add images or remove the folder"
        )
    return found


def _folders_in(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _images_in(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.suffix.lower() in FORMATS and path.is_file()]


def _images_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in _entries(folder):
        if path.is_dir():
            found += _images_below(path)
        elif path.suffix.lower() in FORMATS and not path.is_fifo():  # reading a pipe would wait for ever
            found.append(path)
    return found


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder that are not hidden, sorted."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "__MACOSX")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"the image folder {str(folder)!r} cannot be read ({reason}); check its permissions") from error


def _shortened(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"1 {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def complete_splits(splits: Splits, *, valid_fraction: float, test_fraction: float) -> Splits:
    """Returns all three splits: those that exist as they are, the missing ones held out of the training split.

    Within each class the images whose names have the lowest SHA-256 are held out. Nothing is drawn at random: the same
    names give the same splits everywhere and with every seed, and a new image hardly changes the others' splits.
    """
    train, test, valid = splits["train"], splits.get("test"), splits.get("valid")
    if test is None:
        train, test = hold_out(train, test_fraction)
    if valid is None:
        train, valid = hold_out(train, valid_fraction)
    return {"train": train, "valid": valid, "test": test}


def hold_out(images: Sequence[ImageFile], fraction: float) -> tuple[tuple[ImageFile, ...], tuple[ImageFile, ...]]:
    """Returns the images that are kept and those that are held out, each in the given order.

    Each class keeps at least one image, and holds out at least one if it has two and the fraction is not 0.

    >>> kept, held = hold_out([ImageFile(name=f"a/{n}.png", label=0) for n in range(10)], 0.2)
    >>> len(kept), [image.name for image in held]
    (8, ['a/2.png', 'a/7.png'])
    """
    by_class: dict[int, list[str]] = defaultdict(list)
    for image in images:
        by_class[image.label].append(image.name)
    held: set[str] = set()
    for names in by_class.values():
        number = min(len(names) - 1, max(1, round(fraction * len(names)))) if fraction else 0
        held.update(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:number])
    return (
        tuple(image for image in images if image.name not in held),
        tuple(image for image in images if image.name in held),
    )


_WHITE = 16  # grey values of the digits go from 0 to 16
_DIGITS_TEST_FRACTION = 0.2


def read_digits() -> FoundImages:
    """Reads scikit-learn's digits: 1,797 real ones of 8x8 pixels, part of the package.

    They are split and named as in a tree of files, with relative paths such as train/0/0000.png. The last fifth of each
    digit is the test split. The images are in the order of their writers, so most test images are by other writers than
    the training images, which is harder than a random fifth.
    """
    data = require("sklearn.datasets", "images").load_digits()
    numpy, pillow = require("numpy", "images"), require("PIL.Image", "images")
    greys = (data.images * (255 / _WHITE)).round().astype(numpy.uint8)
    splits: dict[Split, list[ImageFile]] = {"train": [], "test": []}
    embedded: dict[Path, Any] = {}
    for digit in range(10):
        indices = [int(index) for index in (data.target == digit).nonzero()[0]]
        first_of_test = len(indices) - round(_DIGITS_TEST_FRACTION * len(indices))
        for number, index in enumerate(indices):
            split: Split = "train" if number < first_of_test else "test"
            name = f"{digit}/{index:04}.png"
            splits[split].append(ImageFile(name=name, label=digit, path=Path(split, name)))
            embedded[Path(split, name)] = pillow.fromarray(greys[index])
    return FoundImages(
        source="scikit-learn's digits",
        root=Path(),
        classes=tuple("0123456789"),
        splits={split: tuple(files) for split, files in splits.items()},
        embedded=embedded,
    )


def write_digits(folder: Path) -> dict[str, int]:
    """Writes the digits as a tree of PNG files of 8x8 pixels; returns the number of images in each split.

    The tree is written beside ``folder``, which must be new or empty, and then renamed: it is complete or absent. A run
    with ``data=folder`` gets the same pixels as a run without data.
    """
    digits = read_digits()
    _check_empty(folder)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        for path, image in digits.embedded.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            image.save(partial / path)
        partial.rename(folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"the digits cannot be written to {str(folder)!r} ({reason}); give another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {split: len(files) for split, files in digits.splits.items()}


def _check_empty(folder: Path) -> None:
    expected = "expected a new or an empty folder; give another one"
    try:
        if any(folder.iterdir()):
            raise DataError(
                f"the folder {str(folder)!r} is not empty, expected a new or an empty one; give another one"
            )
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise DataError(f"{str(folder)!r} is a file, {expected}") from error
    except OSError as error:
        raise DataError(f"{str(folder)!r} cannot be read ({error.strerror}), {expected}") from error
