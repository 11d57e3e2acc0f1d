"""The embedded pictures: scikit-learn's handwritten digits, 1,797 real ones of 8x8 in 16 greys, part of the package.

Of every digit the last fifth is the test. The pictures lie in the order of their writers, so most of the test's are
by others than the training's; which is harder than a random fifth, and says more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.extras import require
from lockstep.recipes.images.scan import Part, Picture

_WHITE = 16  # the digits' greys go from 0 to 16
_TEST_SHARE = 0.2

DIGIT_CLASSES = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class Digits:
    """The pictures in the parts and with the names that they have as a tree of files.

    Args:
        parts: "train" and "test"; by class and name.
        images: part and name of a picture -> its Pillow image, 8x8 in greys.
    """

    parts: dict[Part, tuple[Picture, ...]]
    images: dict[tuple[Part, str], Any]


def read_digits() -> Digits:
    """Reads them from the installed scikit-learn.

    Raises:
        MissingExtraError: scikit-learn or Pillow is not installed.
    """
    data = require("sklearn.datasets", "images").load_digits()
    numpy, pillow = require("numpy", "images"), require("PIL.Image", "images")
    greys = (data.images * (255 / _WHITE)).round().astype(numpy.uint8)
    labels = [int(label) for label in data.target]
    parts: dict[Part, tuple[Picture, ...]] = {"train": (), "test": ()}
    images: dict[tuple[Part, str], Any] = {}
    for digit, name in enumerate(DIGIT_CLASSES):
        places = [place for place, label in enumerate(labels) if label == digit]
        first_of_test = len(places) - round(_TEST_SHARE * len(places))
        for part, members in (("train", places[:first_of_test]), ("test", places[first_of_test:])):
            pictures = tuple(Picture(name=f"{name}/{place:04}.png", label=digit) for place in members)
            parts[part] += pictures  # type: ignore[index]
            for picture, place in zip(pictures, members, strict=True):
                images[part, picture.name] = pillow.fromarray(greys[place])  # type: ignore[index]
    return Digits(parts=parts, images=images)
