"""The digits as a tree of PNG files: train/0 ... train/9 and test/0 ... test/9, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.pixels import FORMATS

Part = Literal["train", "valid", "test"]

_PART_NAMES: Mapping[str, Part] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "test": "test",
    "testing": "test",
}
_NOT_DATA = "__MACOSX"
_LEVELS = 4


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture and its class.

    Args:
        name: class and place below the class folder, such as "Cat/12.jpg": the same wherever the tree lies.
        label: position of its class among the sorted classes.
        path: the file; a picture that is in memory has none.
    """

    name: str
    label: int
    path: Path = Path()


@dataclass(frozen=True, kw_only=True)
class PictureTree:
    """What a tree of class folders holds.

    Args:
        root: the folder that holds the classes, or the parts.
        classes: names of the classes of the training part, sorted.
        parts: the pictures of each part there is, by class and name; a tree that is not divided has "train" alone.
        left_out: what was found and not taken, in words for a person.
    """

    root: Path
    classes: tuple[str, ...]
    parts: Mapping[Part, tuple[Picture, ...]]
    left_out: tuple[str, ...]


def scan_tree(folder: Path) -> PictureTree:
    """Finds classes, parts and pictures.

    Raises:
        DataError: no folder, nothing to read, no class folders, one class alone, an empty class folder, a class that
            the training part does not have.
    """
    root = _root(folder)
    folders, beside = _parts(root)
    found = {part: _class_folders(path) for part, path in folders.items()}
    classes = tuple(sorted(found["train"]))
    if len(classes) == 1:
        raise DataError(
            f"{_named(folders['train'])} holds one class folder, {classes[0]!r}, expected at least two;"
            " put the pictures of every class into a folder of their own"
        )
    _check_classes(found, folders, classes)
    parts = {part: _labelled(folders[part], by_class, classes) for part, by_class in found.items()}
    return PictureTree(root=root, classes=classes, parts=parts, left_out=(*beside, *_loose(folders)))


def _root(folder: Path) -> Path:
    """The folder of the classes or parts: ``folder``, or below it where there is nothing but one folder of folders."""
    if not folder.is_dir():
        what = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise DataError(
            f"the picture folder {str(folder)!r} {what}; expected one with a folder of pictures for each class;"
            " correct --data, or leave it out for the embedded digits"
        )
    root = folder
    for _ in range(_LEVELS):
        inside = _folders(root)
        if len(inside) != 1 or _pictures_in(root) or not _folders(inside[0]):
            break
        root = inside[0]
    return root


def _parts(root: Path) -> tuple[dict[Part, Path], tuple[str, ...]]:
    """Part -> its folder, and what lies beside them: a folder "train" of folders is a part, one of pictures a class."""
    inside = _folders(root)
    named = [path for path in inside if path.name.lower() in _PART_NAMES]
    if not any(_PART_NAMES[path.name.lower()] == "train" and _folders(path) for path in named):
        return {"train": root}, ()
    parts: dict[Part, Path] = {}
    for path in named:
        part = _PART_NAMES[path.name.lower()]
        if part in parts:
            raise DataError(
                f"{_named(root)} holds {parts[part].name!r} and {path.name!r}, which both mean the part {part!r},"
                " expected one of them; rename or remove the other"
            )
        parts[part] = path
    return parts, tuple(f"the folder {str(path)!r} beside the parts" for path in inside if path not in named)


def _class_folders(part: Path) -> dict[str, tuple[Path, ...]]:
    """Class name -> its pictures, sorted.

    Raises:
        DataError: there is none, or one of them is empty.
    """
    found = {path.name: _pictures_below(path) for path in _folders(part)}
    if not any(found.values()):
        loose = len(_pictures_in(part))
        what = f"{loose} pictures in no class folder" if loose else "no picture"
        formats = ", ".join(sorted(suffix[1:] for suffix in FORMATS))
        raise DataError(f"{_named(part)} holds {what}, expected a folder of pictures ({formats}) for each class")
    empty = [str(part / name) for name, pictures in found.items() if not pictures]
    if empty:
        raise DataError(
            f"{_count(len(empty), 'class folder')} without a picture: {_first(empty)}; expected at least one in each;"
            " put pictures there or remove the folder"
        )
    return found


def _check_classes(
    found: Mapping[Part, Mapping[str, object]], folders: Mapping[Part, Path], classes: tuple[str, ...]
) -> None:
    for part, by_class in found.items():
        unknown = sorted(set(by_class) - set(classes))
        if unknown:
            raise DataError(
                f"{_named(folders[part])} holds {_count(len(unknown), 'class', 'classes')} that the training part"
                f" {str(folders['train'])!r} lacks: {_first(unknown)}; expected some of {_first(list(classes))};"
                " rename or remove the folder"
            )


def _labelled(folder: Path, by_class: Mapping[str, tuple[Path, ...]], classes: tuple[str, ...]) -> tuple[Picture, ...]:
    return tuple(
        Picture(name=path.relative_to(folder).as_posix(), label=label, path=path)
        for label, of_class in enumerate(classes)
        for path in by_class.get(of_class, ())
    )


def _loose(folders: Mapping[Part, Path]) -> tuple[str, ...]:
    counts = {str(path): len(_pictures_in(path)) for path in folders.values()}
    return tuple(
        f"{_count(number, 'picture')} in {path!r} beside the class folders" for path, number in counts.items() if number
    )


def _folders(folder: Path) -> list[Path]:
    return [path for path in _inside(folder) if path.is_dir()]


def _pictures_in(folder: Path) -> list[Path]:
    return [path for path in _inside(folder) if _is_picture(path) and path.is_file()]


def _inside(folder: Path) -> list[Path]:
    """What can be seen in a folder, sorted."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name != _NOT_DATA)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _pictures_below(folder: Path) -> tuple[Path, ...]:
    found: list[Path] = []
    for path in _inside(folder):
        if path.is_dir():
            found.extend(_pictures_below(path))
        elif _is_picture(path) and not path.is_fifo():  # a pipe would keep its reader waiting for ever
            found.append(path)
    return tuple(found)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in FORMATS


def _unreadable(folder: Path, error: OSError) -> DataError:
    reason = (error.strerror or str(error)).lower()
    return DataError(
        f"{_named(folder)} cannot be read ({reason}), expected a folder of pictures; check its permissions"
    )


def _named(folder: Path) -> str:
    return f"the picture folder {str(folder)!r}"


def _first(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"1 {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


@dataclass(frozen=True, kw_only=True)
class PictureParts:
    """Pictures to train on, to validate with after every epoch, and to test with once."""

    train: tuple[Picture, ...]
    valid: tuple[Picture, ...]
    test: tuple[Picture, ...]

    def named(self) -> Mapping[Part, tuple[Picture, ...]]:
        """The parts by name."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


def divide(parts: Mapping[Part, tuple[Picture, ...]], *, valid_share: float, test_share: float) -> PictureParts:
    """The three parts: those that are there as they are, those that are missing held out of the training part.

    Args:
        parts: the pictures of each part there is; "train" always is.
        valid_share: part of each class's training pictures for a missing "valid"; 0 leaves it empty.
        test_share: part of each class's pictures for a missing "test".
    """
    train, test, valid = parts["train"], parts.get("test"), parts.get("valid")
    if test is None:
        train, test = hold_out(train, test_share)
    if valid is None:
        train, valid = hold_out(train, valid_share)
    return PictureParts(train=train, valid=valid, test=test)


def hold_out(pictures: Sequence[Picture], share: float) -> tuple[tuple[Picture, ...], tuple[Picture, ...]]:
    """The pictures kept and the pictures held out, each in the order given.

    A class keeps at least one picture, and gives at least one where it has two and the share is not 0.

    >>> kept, held = hold_out([Picture(name=f"a/{n}.png", label=0) for n in range(10)], 0.2)
    >>> len(kept), [picture.name for picture in held]
    (8, ['a/2.png', 'a/7.png'])
    """
    by_class: dict[int, list[Picture]] = defaultdict(list)
    for picture in pictures:
        by_class[picture.label].append(picture)
    held = {picture.name for members in by_class.values() for picture in _first_by_hash(members, share)}
    return (
        tuple(picture for picture in pictures if picture.name not in held),
        tuple(picture for picture in pictures if picture.name in held),
    )


def _first_by_hash(members: Sequence[Picture], share: float) -> list[Picture]:
    number = min(len(members) - 1, max(1, round(share * len(members)))) if share else 0
    return sorted(members, key=lambda picture: hashlib.sha256(picture.name.encode()).digest())[:number]


_WHITE = 16  # the digits' greys go from 0 to 16
_TEST_SHARE = 0.2

DIGIT_CLASSES = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class Digits:
    """The pictures, divided and named as they are as a tree of files.

    Args:
        parts: "train" and "test", by class and name; the paths are those in the tree: train/0/0000.png.
        images: path -> its Pillow image, 8x8 in greys.
    """

    parts: Mapping[Part, tuple[Picture, ...]]
    images: Mapping[Path, Any]


def read_digits() -> Digits:
    """Reads them from the installed scikit-learn.

    Raises:
        MissingExtraError: scikit-learn or Pillow is not installed.
    """
    data = require("sklearn.datasets", "images").load_digits()
    numpy, pillow = require("numpy", "images"), require("PIL.Image", "images")
    greys = (data.images * (255 / _WHITE)).round().astype(numpy.uint8)
    train: list[Picture] = []
    test: list[Picture] = []
    images: dict[Path, Any] = {}
    for digit, of_class in enumerate(DIGIT_CLASSES):
        places = [int(place) for place in (data.target == digit).nonzero()[0]]
        first_of_test = len(places) - round(_TEST_SHARE * len(places))
        for number, place in enumerate(places):
            part, pictures = ("train", train) if number < first_of_test else ("test", test)
            name = f"{of_class}/{place:04}.png"
            pictures.append(Picture(name=name, label=digit, path=Path(part, name)))
            images[pictures[-1].path] = pillow.fromarray(greys[place])
    return Digits(parts={"train": tuple(train), "test": tuple(test)}, images=images)


def write_digits(folder: Path) -> dict[str, int]:
    """Writes the digits, each at its own 8x8; returns how many went into each part.

    They are written beside ``folder`` and renamed, so that it never holds a part of them. A run with ``data=folder``
    sees the very pixels that a run without data sees.

    Args:
        folder: is made; an empty one is taken.

    Raises:
        DataError: there is something there already, or it cannot be written.
    """
    digits = read_digits()
    _check_free(folder)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        for path, image in digits.images.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            image.save(partial / path)
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"the digits cannot be written to {str(folder)!r} ({(error.strerror or str(error)).lower()}), expected a"
            " place to write to; give another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {part: len(pictures) for part, pictures in digits.parts.items()}


def _check_free(folder: Path) -> None:
    try:
        taken = any(folder.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise DataError(f"{str(folder)!r} is a file, expected a new or an empty folder; give another one") from error
    except OSError as error:
        raise DataError(
            f"{str(folder)!r} cannot be read ({error.strerror}), expected a new or an empty folder"
        ) from error
    if taken:
        raise DataError(f"the folder {str(folder)!r} is not empty, expected a new or an empty one; give another one")
