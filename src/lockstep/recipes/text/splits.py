"""Lines of text in three parts, as every text recipe takes them.

The readers (``python_text``, ``wikitext``) make a ``TextSplits``; the tokenizer and the batches consume it. Nothing
here reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MINIMUM_CHARACTERS = 100
"""Lines must be longer than this many characters: headings and stray lines teach a language model little."""


@dataclass(frozen=True, kw_only=True)
class TextSplits:
    """Text to train on, to validate with after every epoch, and to test with once.

    Args:
        train: lines to train on.
        valid: lines for the validation after each epoch.
        test: lines for the one test at the end.
        source: where the text came from, in words for a person.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    source: str


def split_by_position(lines: Sequence[str], *, source: str) -> TextSplits:
    """Splits lines by their position: of every twenty, the 19th is for validation, the 20th for the test.

    The rule draws nothing, so the same lines give the same parts everywhere, and each part covers the whole text.
    Neighbours of a test line are in the training part, so the test measures new sentences on known subjects.

    >>> parts = split_by_position([str(number) for number in range(40)], source="numbers")
    >>> parts.valid, parts.test, len(parts.train)
    (('18', '38'), ('19', '39'), 36)
    """
    return TextSplits(
        train=tuple(line for position, line in enumerate(lines) if position % 20 < 18),
        valid=tuple(lines[18::20]),
        test=tuple(lines[19::20]),
        source=source,
    )
