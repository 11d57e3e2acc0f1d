"""Where a source's random numbers stand, so that an iteration can be begun once more as it was begun.

    iteration begins, state noted -> batches 0 .. n-1 handed out -> saved: state and n
    restored: state set           -> batches 0 .. n-1 passed over -> batch n, as it would have been

What is noted: torch's default generator, Python's and numpy's, and every ``torch.Generator`` that the data, a
DataLoader or its samplers hold. A source that keeps another state between iterations is to take it from ``set_epoch``.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lockstep.data.prefetch import SKIPPED
from lockstep.data.source_random import default_state, set_default_state
from lockstep.errors import ConfigError, DataError

T = TypeVar("T")

RandomState = dict[str, Tensor]
"""Generator's name -> its state; only tensors, so that a checkpoint can hold it."""

STARTED = "started"
"""In a state: persistent processes had been started, so the iteration began without drawing a seed for them."""

_DEFAULT = "torch"


def sampling_generators(dataset: Any) -> list[torch.Generator]:
    """The generators that decide the order: those of a DataLoader and of its samplers, each once."""
    if not isinstance(dataset, DataLoader):
        return _unique(_held(dataset)) if isinstance(dataset, Sampler) else []
    return _unique([*_held(dataset), *_held(dataset.sampler), *_held(dataset.batch_sampler)])


def all_generators(dataset: Any) -> list[torch.Generator]:
    """Those that decide the order, and those that the data itself holds."""
    below = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    return _unique([*sampling_generators(dataset), *_held(below)])


def random_state(dataset: Any) -> RandomState:
    """The states of all generators that ``dataset`` may draw from, now."""
    own = {f"data {index}": generator.get_state() for index, generator in enumerate(all_generators(dataset))}
    return {_DEFAULT: default_state(), **_python_state(), **_numpy_state(), **own}


def set_random_state(dataset: Any, state: Mapping[str, Tensor]) -> None:
    """Puts back what ``random_state`` gave, in this process or another.

    Raises:
        DataError: the data holds other generators than the state has.
    """
    generators, own = all_generators(dataset), [name for name in state if name.startswith("data ")]
    if len(generators) != len(own):
        raise DataError(
            f"the saved position has the states of {len(own)} generators of the data, which now holds "
            f"{len(generators)}; give the data and samplers that it was saved with"
        )
    for index, generator in enumerate(generators):
        generator.set_state(state[f"data {index}"])
    if _DEFAULT in state:
        set_default_state(state[_DEFAULT])
    _set_python_state(state)
    _set_numpy_state(state)


def without_default(state: Mapping[str, Tensor]) -> RandomState:
    """The state without that of torch's default generator, which stays as it is when the rest is put back."""
    return {name: value for name, value in state.items() if name != _DEFAULT}


def begin_again(dataset: Any, random: Mapping[str, Tensor] | None) -> Callable[[], None] | None:
    """Sets the generators to where an iteration began, if one is to be begun again.

    Returns:
        What is to be called when the iteration has begun: it puts torch's default generator, the caller's, back.
    """
    if random is None:
        return None
    callers = default_state()
    set_random_state(dataset, random)
    return partial(set_default_state, callers) if _DEFAULT in random else None


def check_skip(skip: int) -> None:
    """Refuses what is no number of batches with a ConfigError."""
    if type(skip) is not int or skip < 0:
        raise ConfigError(f"skip={skip!r} is no number of batches; give 0 or more")


def passing_over(skip: int, source: Iterator[T]) -> Iterator[T]:
    """The items of ``source``, the first ``skip`` of them ``SKIPPED``.

    Raises:
        ConfigError: ``skip`` is no number of batches.
    """
    check_skip(skip)
    return chain((SKIPPED for _ in islice(source, skip)), source) if skip else source


def _held(holder: Any) -> Iterator[torch.Generator]:
    """The generators among an object's attributes, and among those of samplers that it wraps."""
    for value in getattr(holder, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, Sampler):
            yield from _held(value)


def _unique(generators: Iterable[torch.Generator]) -> list[torch.Generator]:
    return list({id(generator): generator for generator in generators}.values())


def _python_state() -> RandomState:
    _, words, spare = random.getstate()
    return {"python": torch.tensor(words), "python normal": _spare(spare)}


def _set_python_state(state: Mapping[str, Tensor]) -> None:
    version, _, _ = random.getstate()
    spare = state["python normal"].item()
    random.setstate((version, tuple(state["python"].tolist()), None if math.isnan(spare) else spare))


def _numpy_state() -> RandomState:
    numpy = sys.modules.get("numpy")
    found = numpy.random.get_state(legacy=False) if numpy else {}
    if found.get("bit_generator") != "MT19937":
        return {}
    words, position = found["state"]["key"].tolist(), found["state"]["pos"]
    return {
        "numpy": torch.tensor([*words, position]),
        "numpy normal": _spare(found["gauss"] if found["has_gauss"] else None),
    }


def _set_numpy_state(state: Mapping[str, Tensor]) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is None or "numpy" not in state:
        return
    *words, position = state["numpy"].tolist()
    spare = state["numpy normal"].item()
    numpy.random.set_state(
        ("MT19937", words, position, int(not math.isnan(spare)), 0.0 if math.isnan(spare) else spare)
    )


def _spare(normal: float | None) -> Tensor:
    """Normal numbers are drawn in pairs; the second one of a pair, or NaN where none is left over."""
    return torch.tensor(math.nan if normal is None else normal, dtype=torch.float64)
