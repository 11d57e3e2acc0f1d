"""A bar that grows while pictures are decoded, for a person at a terminal; it is gone when all are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.extras import require
from lockstep.recipes.images.pixels import Progress


@contextmanager
def decoding_bar(*, quiet: bool) -> Iterator[Progress | None]:
    """What to tell how many pictures are decoded, of how many; None where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with require("tqdm", "train").tqdm(desc="decoding", unit=" pictures", leave=False, file=sys.stderr) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        yield progress
