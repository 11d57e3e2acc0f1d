"""The random numbers of a source that is read ahead: those of a plain loop.

If a dataset draws (a random crop) while the consumer or a replica draws too, every run would get other numbers. So the
reading thread draws from a copy of the default generator, in the order in which a plain loop would draw, and torch's
default generator follows with each item that the consumer takes:

    default generator  --copy-->  the source's generator  --item taken-->  default generator, if nobody else has drawn

Only a loop that draws too gets other numbers, and a warning. Therefore a source that draws is read ahead only on
request, and one that draws from Python's, NumPy's or its own generators never is: those cannot be copied so.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lockstep.replicas.rng.mode import DEFAULT_GENERATOR_LOCK, ReplicaRng
from lockstep.replicas.rng.state import own_generator

_NOT_THE_USERS = ("builtins", "torch", "numpy", "datasets", "transformers", "accelerate", "lockstep")
"""Packages whose code is not searched: what it draws from is an argument or an attribute."""
_MOST_LOOKED_AT = 500
_MOST_OF_A_LIST = 32


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


# ---- the generators that a source draws from


def watched_generators(dataset: Any, *, default: bool) -> Callable[[], list[Any]]:
    """Returns a function that returns the states of the generators that must be drawn from in program order.

    They are Python's, NumPy's, and those that a dataset, a DataLoader and its samplers reach through their attributes
    and their code, such as a transform's or a global of the program. A reading thread has no copy of them. ``default``
    adds torch's default generator, so that the loop may draw from it too.
    """
    # Loading processes have their own copies; only the samplers draw in this process.
    in_processes = isinstance(dataset, DataLoader) and dataset.num_workers > 0
    held = list(_reachable([dataset.sampler, dataset.batch_sampler, dataset.generator] if in_processes else [dataset]))

    def states() -> list[Any]:
        own = default_state().view(torch.int64).tolist() if default else None
        return [own, random.getstate(), pickle.dumps(numpy_state()), *map(_state, held)]

    return states


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().view(torch.int64).tolist()
    return generator.getstate() if isinstance(generator, random.Random) else pickle.dumps(generator)


def _reachable(roots: list[Any]) -> Iterator[Any]:
    """The generators that the roots reach through attributes, lists, and the names in their methods and functions."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    due, seen = deque(roots), dict[int, Any]()
    while due and len(seen) < _MOST_LOOKED_AT:
        node = due.popleft()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, kinds):
            yield node
        else:
            due.extend(_reached(node))


def _reached(node: Any) -> list[Any]:
    if isinstance(node, (list, tuple)):
        return list(node[:_MOST_OF_A_LIST])
    if isinstance(node, dict):
        return list(islice(node.values(), _MOST_OF_A_LIST))
    if isinstance(node, MethodType):
        return [node.__self__, node.__func__]
    if isinstance(node, partial):
        return [node.func, node.args, node.keywords]
    if isinstance(node, FunctionType):
        return [*_named(node), *(node.__defaults__ or ())]
    if isinstance(node, (type, ModuleType, Tensor)):
        return []
    own: dict[str, Any] = {}
    with suppress(AttributeError):
        own = object.__getattribute__(node, "__dict__")  # not the answer of a proxy
    classes = [base for base in type(node).__mro__ if base.__module__.split(".")[0] not in _NOT_THE_USERS]
    methods = [each for base in classes for each in vars(base).values() if isinstance(each, FunctionType)]
    return [*own.values(), *methods]


def _named(function: FunctionType) -> Iterator[Any]:
    """What a user's function finds in its closure, and by name in its globals."""
    if function.__module__ is None or function.__module__.split(".")[0] in _NOT_THE_USERS:
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(each for each in code.co_consts if isinstance(each, CodeType))
        for name in code.co_names:
            if not isinstance(found := function.__globals__.get(name), ModuleType):
                yield found
            elif found.__name__.split(".")[0] not in _NOT_THE_USERS:
                yield from (vars(found)[each] for each in code.co_names if each in vars(found))


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
