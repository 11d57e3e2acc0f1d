"""What a launcher says to the person who waits: one line at a time; who prints it is another's concern."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str], None]
"""Takes one line."""


def tell_nobody(line: str) -> None:
    """For who does not want to know."""
