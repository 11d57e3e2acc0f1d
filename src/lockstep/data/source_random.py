"""Random numbers as a source sees them that is read in a thread.

A dataset that draws (a random crop) while the consumer or a replica draws too would give every run other numbers. So
the reading thread goes on from a copy of the default generator's state, in the order in which a plain loop would draw,
and torch's own generator follows with each item that the consumer takes:

    default generator  --copy-->  the source's generator  --item taken-->  default generator, if nobody else has drawn

An iteration that is left early leaves torch's generator where a plain loop would, then; only a loop that draws too gets
other numbers, and a warning. So a source that draws is read ahead only where somebody has asked for it, and one that
draws from Python's or NumPy's generators, or from those that the data holds, which cannot be copied so, never is.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.replicas.default_generator import own_generator
from lockstep.replicas.random import DEFAULT_GENERATOR_LOCK, ReplicaRandom

_MOST_LOOKED_AT = 500
_MOST_OF_A_LIST = 32


class SourceRandom:
    """A copy of torch's default generator as it is now, for the reading thread. Made in the consumer's thread."""

    def __init__(self) -> None:
        self._begin = default_state()
        self._generator = torch.Generator().set_state(self._begin)
        self._together = False

    def mode(self) -> ReplicaRandom:
        """A mode for the reading thread, in which torch's random functions on CPU tensors draw from the copy."""
        return ReplicaRandom(self._generator)

    def state(self) -> torch.Tensor:
        """Where the copy stands; for the reading thread."""
        return self._generator.get_state()

    def begun(self) -> None:
        """The default generator is the caller's again; for the consumer's thread."""
        self._together = _equal(default_state(), self._begin)

    def follow(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Sets the default generator to where it is after an item, if it stands where it was before that item.

        A consumer that has drawn from the default generator itself is warned once, if the source draws too.

        Args:
            before: where the copy was before the item that the consumer takes now.
            after: where it was after it.
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


def watched_generators(dataset: Any, *, default: bool) -> Callable[[], list[Any]]:
    """A function that gives the states of the generators that are to be drawn from in program order, to be compared.

    They are Python's, NumPy's, and those found among the attributes of a dataset, a DataLoader and its samplers, and of
    what these hold, such as transforms. A reading thread has no copy of them.

    Args:
        dataset: the source.
        default: torch's default generator is one of them, so that the loop may draw from it too.
    """
    # Loading processes have copies of their own; only the samplers draw here.
    in_processes = isinstance(dataset, DataLoader) and dataset.num_workers > 0
    held = (
        list(_held(vars(dataset), leave_out="dataset" if in_processes else None))
        if hasattr(dataset, "__dict__")
        else []
    )

    def states() -> list[Any]:
        numpy = sys.modules.get("numpy")
        own = default_state().view(torch.int64).tolist() if default else None
        return [own, random.getstate(), _numpy_state(numpy) if numpy else None, *map(_state, held)]

    return states


def _held(attributes: dict[str, Any], leave_out: str | None) -> Iterator[Any]:
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    due, seen = [value for name, value in attributes.items() if name != leave_out], set[int]()
    while due and len(seen) < _MOST_LOOKED_AT:
        node = due.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, kinds):
            yield node
        elif isinstance(node, (list, tuple)):
            due.extend(node[:_MOST_OF_A_LIST])
        elif isinstance(node, dict):
            due.extend(list(node.values())[:_MOST_OF_A_LIST])
        elif not isinstance(node, (type, torch.Tensor)) and hasattr(node, "__dict__"):
            due.extend(vars(node).values())


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().view(torch.int64).tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(generator)


def _numpy_state(numpy: Any) -> Any:
    found = numpy.random.get_state(legacy=False)
    state = found["state"]
    if found["bit_generator"] != "MT19937":
        return repr(found)
    return state["key"].tobytes(), state["pos"], found["has_gauss"], found["gauss"]


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


def _equal(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Compared as bytes: an operator of torch would look like a program that waits for a device."""
    return state.numpy().tobytes() == other.numpy().tobytes()
