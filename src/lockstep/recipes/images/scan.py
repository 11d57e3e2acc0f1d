"""Finds the pictures of a tree of class folders, as a person has unpacked it; decodes none of them.

    DIR/CLASS/*.jpg                                 one tree, which ``parts`` divides
    DIR/train/CLASS/*.jpg, DIR/test/CLASS/*.jpg     divided already; valid/ may stand beside

The folder may be named one level too high, other files may lie about (LICENSE.txt, Thumbs.db), and whatever begins
with a dot is not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import DataError
from lockstep.recipes.images.decode import FORMATS

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
