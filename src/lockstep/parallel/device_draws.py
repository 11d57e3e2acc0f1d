"""A GPU's random numbers for what a tensor rank alone holds: another seed, at the place where the replica's stand.

    all ranks    seed s        place 0 --- 4 -------- 12 ---> ...        dropout of what all ranks hold alike
    rank r       seed (s, r)             4 --- 8 --- 12                  dropout of its own heads

A generator of a GPU is a seed and a place. Both kinds of draws move one place on, so the ranks stay together, and
whatever sets the place back, as gradient checkpointing does to draw a block's masks once more, does so for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class DeviceDraws:
    """Switches a GPU's default generator between the two seeds. For one replica's thread at a time.

    Args:
        default: gives that generator.
        own: what tells this rank from the others.
    """

    def __init__(self, default: Callable[[], torch.Generator], own: int) -> None:
        self._default = default
        self._own = own
        self._common: int | None = None
        """The seed of all ranks, while the generator has the rank's own."""

    @contextmanager
    def apart(self, on: bool) -> Iterator[None]:
        """Inside the block draws are the rank's own, or, where ``on`` is False, those of all ranks again."""
        generator = self._default()
        before, common = generator.initial_seed(), self._common
        if on and common is None:
            self._common = before
            _seed(generator, self._mixed(before))
        elif not on and common is not None:
            self._common = None
            _seed(generator, common)
        try:
            yield
        finally:
            self._common = common
            _seed(generator, before)

    def _mixed(self, common: int) -> int:
        digest = hashlib.sha256(f"{common}/{self._own}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)


def _seed(generator: torch.Generator, seed: int) -> None:
    """Another seed, at the same place."""
    if generator.initial_seed() != seed % 2**64:
        place = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(place)
