"""Divides the pictures of a tree into training, validation and test, where the tree does not do so itself.

The rule: within each class, pictures are put in the order of the SHA-256 of their names, and the first of them, as many
as the share says, are held out. It draws nothing: the same names give the same parts on every machine and with every
seed, each class keeps its share, and a picture that is added later hardly moves the others.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.recipes.images.scan import Part, Picture


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
