"""The random generators of a source: their states, saved as an iteration begins so that it can be resumed.

A resumed iteration sets them and skips the batches that were used. A source that keeps other state between iterations
must derive it from ``set_epoch``.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lockstep.errors import DataError
from lockstep.replicas.rng.function_mode import DEFAULT_GENERATOR_LOCK

DEFAULT = "torch"
"""The key of torch's default generator, which belongs to the caller."""
RandomState = dict[str, Tensor]
"""The name of a generator -> its state. Tensors only, so that a checkpoint can hold it."""

STARTED = "started"
"""A key in a state: persistent processes ran already, so the iteration began without drawing a seed for them."""


def random_state(dataset: Any) -> RandomState:
    """Returns the current states of all generators that ``dataset`` may draw from."""
    _, values, spare = random.getstate()
    state = {DEFAULT: default_state(), "python": torch.tensor(values), "python normal": _spare_normal(spare)}
    numpy_random = numpy_state()
    # A program may have put another generator there, by numpy.random.set_bit_generator. Its state has another form.
    if numpy_random and numpy_random["bit_generator"] == "MT19937":
        state["numpy"] = torch.tensor([*numpy_random["state"]["key"].tolist(), numpy_random["state"]["pos"]])
        state["numpy normal"] = _spare_normal(numpy_random["gauss"] if numpy_random["has_gauss"] else None)
    of_data = {f"data {index}": generator.get_state() for index, generator in enumerate(all_generators(dataset))}
    return {**state, **of_data}


def set_random_state(dataset: Any, state: Mapping[str, Tensor]) -> None:
    """Restores what ``random_state`` returned. Raises DataError if the dataset now holds other generators."""
    generators, names = all_generators(dataset), [name for name in state if name.startswith("data ")]
    if len(generators) != len(names):
        raise DataError(
            f"the saved position has the states of {len(names)} generators of the data, which now holds "
            f"{len(generators)}; give the data and samplers that it was saved with"
        )
    for index, generator in enumerate(generators):
        generator.set_state(state[f"data {index}"])
    if DEFAULT in state:
        set_default_state(state[DEFAULT])
    version, _, _ = random.getstate()
    spare = state["python normal"].item()
    random.setstate((version, tuple(state["python"].tolist()), None if math.isnan(spare) else spare))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        *values, position = state["numpy"].tolist()
        spare = state["numpy normal"].item()
        has_spare = not math.isnan(spare)
        numpy.random.set_state(("MT19937", values, position, int(has_spare), spare if has_spare else 0.0))


def without_default(state: Mapping[str, Tensor]) -> RandomState:
    """Returns the state without that of torch's default generator, which then stays as it is on restoring."""
    return {name: value for name, value in state.items() if name != DEFAULT}


def _spare_normal(value: float | None) -> Tensor:
    """Normal numbers are drawn in pairs. This is the second number of a pair, or NaN if none is left over."""
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)


def default_state() -> Tensor:
    """Returns the state of torch's default generator, a uint8 tensor on the CPU."""
    # While a replica draws, the default generator holds the replica's numbers (``replicas.rng.function_mode``). Without
    # the lock these could be taken for the caller's.
    with DEFAULT_GENERATOR_LOCK:
        return torch.default_generator.get_state()


def set_default_state(state: Tensor) -> None:
    """Sets torch's default generator to what ``default_state`` returned."""
    with DEFAULT_GENERATOR_LOCK:
        torch.default_generator.set_state(state)


def all_generators(dataset: Any) -> list[torch.Generator]:
    """Returns the generators that decide the order, and those that the dataset itself holds."""
    if isinstance(dataset, DataLoader):
        return generators_of(dataset, dataset.sampler, dataset.batch_sampler, dataset.dataset)
    return generators_of(dataset)


def generators_of(*holders: Any) -> list[torch.Generator]:
    """Returns the generators among the attributes of some objects and of the samplers that they wrap, each once."""
    generators: dict[int, torch.Generator] = {}
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            values = generators_of(value) if isinstance(value, Sampler) else [value]
            generators |= {id(generator): generator for generator in values if isinstance(generator, torch.Generator)}
    return list(generators.values())


def numpy_state() -> dict[str, Any]:
    """The state of NumPy's default generator; empty if the program has not imported NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state(legacy=False) if numpy else {}
