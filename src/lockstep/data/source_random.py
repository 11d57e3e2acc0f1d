"""The random numbers of a source that is read ahead: those of a plain loop.

If a dataset draws (a random crop) while the consumer or a replica draws too, every run would get other numbers. So the
reading thread draws from a copy of the default generator, in the order in which a plain loop would draw, and torch's
default generator follows with each item that the consumer takes:

    default generator  --copy-->  the source's generator  --item taken-->  default generator, if nobody else has drawn

Only a loop that draws too gets other numbers, and a warning. Therefore a source that may draw is read ahead only on
request. Python's, NumPy's and its own generators cannot be copied so: they may come further than a loop that is left.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lockstep.replicas.rng.mode import DEFAULT_GENERATOR_LOCK, ReplicaRng
from lockstep.replicas.rng.state import own_generator


def default_state() -> Tensor:
    """Returns the state of torch's default generator, a uint8 tensor on the CPU."""
    with DEFAULT_GENERATOR_LOCK:
        return torch.default_generator.get_state()


def set_default_state(state: Tensor) -> None:
    """Sets torch's default generator to what ``default_state`` returned."""
    with DEFAULT_GENERATOR_LOCK:
        torch.default_generator.set_state(state)


class SourceRandom:
    """A copy of torch's default generator, for the reading thread. Made in the consumer's thread."""

    def __init__(self) -> None:
        self._begin = default_state()
        self._generator = torch.Generator().set_state(self._begin)
        self._together = False

    def mode(self) -> ReplicaRng:
        """Returns a mode for the reading thread, in which torch's random functions on the CPU draw from the copy."""
        return ReplicaRng(self._generator)

    def state(self) -> Tensor:
        """Returns the state of the copy; for the reading thread."""
        return self._generator.get_state()

    def begun(self) -> None:
        """Is called in the consumer's thread when the default generator is the caller's again."""
        self._together = _equal(default_state(), self._begin)

    def follow(self, before: Tensor, after: Tensor) -> None:
        """Sets the default generator to the state ``after`` the item taken now, if it has the state ``before`` it.

        A consumer that has drawn from the default generator is warned once, if the source draws too.
        """
        with DEFAULT_GENERATOR_LOCK:
            if _equal(torch.default_generator.get_state(), before):
                torch.default_generator.set_state(after)
                self._together = True
                return
        if self._together and not _equal(before, after):
            self._together = False
            warnings.warn(
                "both the data and the loop over it draw from torch's default generator, and the data is read ahead, "
                "so the numbers are not those of a plain loop, which draws in turn; distribute the data with "
                "prefetch=0, or give the data or the loop a torch.Generator of its own",
                stacklevel=2,
            )


@contextmanager
def borrowed_default(generator: torch.Generator) -> Iterator[None]:
    """Makes whatever draws from this thread's default generator draw the numbers of ``generator`` instead.

    In a thread that reads ahead, that default is the source's generator; in the consumer's thread it is torch's.
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


def _equal(state: Tensor, other: Tensor) -> bool:
    """Compares as bytes: an operator of torch would look like a program that waits for a device."""
    return state.numpy().tobytes() == other.numpy().tobytes()


# ---- the states to resume from


def sampling_generators(dataset: Any) -> list[torch.Generator]:
    """Returns the generators that decide the order: those of a DataLoader and of its samplers, each once."""
    if isinstance(dataset, DataLoader):
        return _held_by(dataset, dataset.sampler, dataset.batch_sampler)
    return _held_by(dataset) if isinstance(dataset, Sampler) else []


def all_generators(dataset: Any) -> list[torch.Generator]:
    """Returns the generators that decide the order, and those that the dataset itself holds."""
    if isinstance(dataset, DataLoader):
        return _held_by(dataset, dataset.sampler, dataset.batch_sampler, dataset.dataset)
    return _held_by(dataset)


def _held_by(*holders: Any) -> list[torch.Generator]:
    """The generators among the attributes of some objects and of the samplers that they wrap, each once."""
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            held = _held_by(value) if isinstance(value, Sampler) else [value]
            found |= {id(each): each for each in held if isinstance(each, torch.Generator)}
    return list(found.values())


def numpy_state() -> dict[str, Any]:
    """The state of NumPy's default generator; empty if the program has not imported NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state(legacy=False) if numpy else {}
