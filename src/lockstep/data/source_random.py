"""torch's default generator as a source sees it that is read in a thread.

A dataset that draws (a random crop) while the consumer or a replica draws too would give every run other numbers. So
the reading thread goes on from a copy of the default generator's state, in the order in which a plain loop would draw:

    default generator  --copy-->  the source's generator  --all items read-->  back, if nobody else has drawn
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.replicas.default_generator import own_generator
from lockstep.replicas.random import DEFAULT_GENERATOR_LOCK, ReplicaRandom


class SourceRandom:
    """A copy of torch's default generator as it is now. Made and given back in the consumer's thread.

    A consumer that draws from the default generator between batches sees numbers that the source sees too; a
    generator of its own avoids that. Python's and numpy's random numbers are not this class's business.
    """

    def __init__(self) -> None:
        self._begin = default_state()
        self._generator = torch.Generator().set_state(self._begin)

    def mode(self) -> ReplicaRandom:
        """A mode for the reading thread, in which torch's random functions on CPU tensors draw from the copy."""
        return ReplicaRandom(self._generator)

    def give_back(self) -> None:
        """Sets the default generator to where the source has come, unless it was drawn from in the meantime."""
        with DEFAULT_GENERATOR_LOCK:
            if torch.equal(torch.default_generator.get_state(), self._begin):
                torch.default_generator.set_state(self._generator.get_state())


def default_state() -> torch.Tensor:
    """The state of torch's default generator: uint8 on the CPU."""
    with DEFAULT_GENERATOR_LOCK:
        return torch.default_generator.get_state()


def set_default_state(state: torch.Tensor) -> None:
    """Sets torch's default generator to what ``default_state`` gave."""
    with DEFAULT_GENERATOR_LOCK:
        torch.default_generator.set_state(state)


@contextmanager
def borrowed_default(generator: torch.Generator) -> Iterator[None]:
    """Lets what draws from the default generator of this thread draw the numbers of ``generator`` instead.

    In a thread that reads ahead, that is the source's generator; in the consumer's, torch's own.
    """
    here = own_generator.get()
    lent = (here() if here is not None else None) or torch.default_generator
    with DEFAULT_GENERATOR_LOCK:
        state = lent.get_state()
        lent.set_state(generator.get_state())
    try:
        yield
    finally:
        with DEFAULT_GENERATOR_LOCK:
            generator.set_state(lent.get_state())
            lent.set_state(state)
