"""The embedded pictures: scikit-learn's handwritten digits, 1,797 real ones of 8x8 in 16 greys, part of the package.

Of every digit the last fifth is the test. The pictures lie in the order of their writers, so most of the test's are
by others than the training's; which is harder than a random fifth, and says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.extras import require
from lockstep.recipes.images.scan import Part, Picture

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
