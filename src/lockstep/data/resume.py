"""The states of the generators that a source draws from, so that an iteration can be resumed where it was left.

    iteration begins: states taken -> batches 0 .. n-1 used    -> saved: the states and n
    resumed: states set            -> batches 0 .. n-1 skipped -> batch n, as it would have been

The states are those of torch's default generator, Python's, NumPy's, and every ``torch.Generator`` that the dataset, a
DataLoader or its samplers hold. A source that keeps other state between iterations must derive it from ``set_epoch``.
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
"""The name of a generator -> its state. Tensors only, so that a checkpoint can hold it."""

STARTED = "started"
"""A key in a state: persistent processes ran already, so the iteration began without drawing a seed for them."""

_DEFAULT = "torch"


def sampling_generators(dataset: Any) -> list[torch.Generator]:
    """Returns the generators that decide the order: those of a DataLoader and of its samplers, each once."""
    if not isinstance(dataset, DataLoader):
        return _unique(_held_by(dataset)) if isinstance(dataset, Sampler) else []
    return _unique([*_held_by(dataset), *_held_by(dataset.sampler), *_held_by(dataset.batch_sampler)])


def all_generators(dataset: Any) -> list[torch.Generator]:
    """Returns the generators that decide the order, and those that the dataset itself holds."""
    below = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    return _unique([*sampling_generators(dataset), *_held_by(below)])


def random_state(dataset: Any) -> RandomState:
    """Returns the current states of all generators that ``dataset`` may draw from."""
    own = {f"data {index}": generator.get_state() for index, generator in enumerate(all_generators(dataset))}
    return {_DEFAULT: default_state(), **_python_state(), **_numpy_state(), **own}


def set_random_state(dataset: Any, state: Mapping[str, Tensor]) -> None:
    """Restores what ``random_state`` returned, in this process or another.

    Raises:
        DataError: the dataset holds other generators than the state has.
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
    """Returns the state without that of torch's default generator, which then stays as it is on restoring."""
    return {name: value for name, value in state.items() if name != _DEFAULT}


def begin_again(dataset: Any, random: Mapping[str, Tensor] | None) -> Callable[[], None] | None:
    """Sets the generators to ``random``, the states at the beginning of an earlier iteration, if given.

    Returns:
        A function to call when the iteration has begun. It gives torch's default generator back to the caller.
    """
    if random is None:
        return None
    callers = default_state()
    set_random_state(dataset, random)
    return partial(set_default_state, callers) if _DEFAULT in random else None


def check_skip(skip: int) -> None:
    """Raises a ConfigError if ``skip`` is not a number of batches."""
    if type(skip) is not int or skip < 0:
        raise ConfigError(f"skip={skip!r} is not a number of batches; give 0 or more")


def skip_first(skip: int, source: Iterator[T]) -> Iterator[T]:
    """Yields the items of ``source``, with ``SKIPPED`` in place of each of the first ``skip`` items."""
    check_skip(skip)
    return chain((SKIPPED for _ in islice(source, skip)), source) if skip else source


def _held_by(holder: Any) -> Iterator[torch.Generator]:
    """The generators among an object's attributes, and among those of samplers that it wraps."""
    for value in getattr(holder, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, Sampler):
            yield from _held_by(value)


def _unique(generators: Iterable[torch.Generator]) -> list[torch.Generator]:
    return list({id(generator): generator for generator in generators}.values())


def _python_state() -> RandomState:
    _, values, spare = random.getstate()
    return {"python": torch.tensor(values), "python normal": _spare_normal(spare)}


def _set_python_state(state: Mapping[str, Tensor]) -> None:
    version, _, _ = random.getstate()
    spare = state["python normal"].item()
    random.setstate((version, tuple(state["python"].tolist()), None if math.isnan(spare) else spare))


def _numpy_state() -> RandomState:
    numpy = sys.modules.get("numpy")
    found = numpy.random.get_state(legacy=False) if numpy else {}
    if found.get("bit_generator") != "MT19937":
        return {}
    values, position = found["state"]["key"].tolist(), found["state"]["pos"]
    return {
        "numpy": torch.tensor([*values, position]),
        "numpy normal": _spare_normal(found["gauss"] if found["has_gauss"] else None),
    }


def _set_numpy_state(state: Mapping[str, Tensor]) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is None or "numpy" not in state:
        return
    *values, position = state["numpy"].tolist()
    spare = state["numpy normal"].item()
    has_spare = not math.isnan(spare)
    numpy.random.set_state(("MT19937", values, position, int(has_spare), spare if has_spare else 0.0))


def _spare_normal(value: float | None) -> Tensor:
    """Normal numbers are drawn in pairs. This is the second number of a pair, or NaN if none is left over."""
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)
