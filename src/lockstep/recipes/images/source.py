"""From a config to pictures with labels, decoded: the digits or a tree of class folders, in three parts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.decode import prepare
from lockstep.recipes.images.digits import DIGIT_CLASSES, read_digits
from lockstep.recipes.images.parts import PictureParts, divide
from lockstep.recipes.images.pixels import PixelStore, memory_store
from lockstep.recipes.images.scan import Picture, scan_tree

_NAMED = 3  # broken pictures that a message names


@dataclass(frozen=True, kw_only=True)
class BrokenPicture:
    """A picture that is skipped: its file and the reason."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LabelledPictures:
    """One part of the pictures: places in the pixels, and labels, without the broken ones."""

    rows: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PictureSource:
    """Pictures, decoded.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8.
        parts: "train", "valid" and "test".
        classes: names, in the order of the labels.
        broken: the pictures that are skipped.
        source: where they came from, in words for a person.
    """

    pixels: Any
    parts: Mapping[str, LabelledPictures]
    classes: tuple[str, ...]
    broken: tuple[BrokenPicture, ...]
    source: str


def read_pictures(config: ImagesConfig) -> PictureSource:
    """Reads and decodes the pictures that the config names, or the embedded ones.

    Raises:
        DataError: the pictures cannot be used, or too many of them are broken.
    """
    return _digits(config) if config.data is None else _tree(config)


def _digits(config: ImagesConfig) -> PictureSource:
    digits = read_digits()
    parts = divide(digits.parts, valid_share=config.valid_share, test_share=config.test_share)
    keys = list(digits.images)
    numpy = require("numpy", "images")
    store = PixelStore(pixels=numpy.stack([prepare(digits.images[key], config.size) for key in keys]), broken={})
    places = {key: place for place, key in enumerate(keys)}
    from_part = {"train": "train", "valid": "train", "test": "test"}
    labelled = {
        part: LabelledPictures(
            rows=tuple(places[from_part[part], picture.name] for picture in pictures),  # type: ignore[index]
            labels=tuple(picture.label for picture in pictures),
        )
        for part, pictures in parts.named().items()
    }
    return PictureSource(
        pixels=store.pixels, parts=labelled, classes=DIGIT_CLASSES, broken=(), source="scikit-learn's digits"
    )


def _tree(config: ImagesConfig) -> PictureSource:
    assert config.data is not None
    tree = scan_tree(config.data.expanduser())
    for what in tree.left_out:
        warnings.warn(f"left out: {what}", stacklevel=4)
    parts = divide(tree.parts, valid_share=config.valid_share, test_share=config.test_share)
    pictures = [picture for part in parts.named().values() for picture in part]
    store = memory_store([picture.path for picture in pictures], size=config.size, workers=config.decoders)
    broken = _broken(pictures, store, config.max_broken)
    return PictureSource(
        pixels=store.pixels,
        parts=_labelled(parts, store),
        classes=tree.classes,
        broken=broken,
        source=str(config.data),
    )


def _labelled(parts: PictureParts, store: PixelStore) -> Mapping[str, LabelledPictures]:
    labelled, place = {}, 0
    for name, pictures in parts.named().items():
        whole = [(place + n, picture.label) for n, picture in enumerate(pictures) if place + n not in store.broken]
        place += len(pictures)
        labelled[name] = LabelledPictures(
            rows=tuple(row for row, _ in whole), labels=tuple(label for _, label in whole)
        )
    return labelled


def _broken(pictures: Sequence[Picture], store: PixelStore, most: float) -> tuple[BrokenPicture, ...]:
    broken = tuple(
        BrokenPicture(path=str(pictures[place].path), reason=reason) for place, reason in store.broken.items()
    )
    if not broken:
        return ()
    named = ", ".join(f"{one.path!r} ({one.reason})" for one in broken[:_NAMED])
    more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    said = f"{len(broken)} of {len(pictures)} pictures are broken: {named}{more}"
    if len(broken) > most * len(pictures):
        raise DataError(
            f"{said}; expected at most max_broken={most:g} of them; mend or remove them, or raise max_broken"
        )
    warnings.warn(f"{said}; they are skipped", stacklevel=5)
    return broken
