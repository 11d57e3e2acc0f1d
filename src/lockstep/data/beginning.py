"""The exchange with which an iteration over data that all workers share begins.

every worker's number of batches and of examples   -> compared; the worker that has another one is named
the chief's generators                             -> every worker's, so that what shuffles, shuffles alike
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.collectives.communicator import Workers
from lockstep.data.source_random import default_state, set_default_state
from lockstep.errors import ClusterError

_UNKNOWN = -1
_SIZE = struct.Struct("<I")
_CALL = "the beginning of an iteration over the data"


def batches_in(dataset: object) -> int | None:
    """The length of a source, or None where it does not say."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:  # a DataLoader over a stream has __len__, which raises
        return None


def begin_alike(workers: Workers, dataset: Iterable[Any], generators: Sequence[torch.Generator]) -> None:
    """Compares what the workers are to iterate over, and gives all the chief's generators. Every worker must call it.

    Args:
        workers: all workers.
        dataset: this one's.
        generators: those, beside torch's default one, that must stand where the chief's stand.

    Raises:
        ClusterError: a worker has data of another length, or with other generators, than the chief.
    """
    examples = _examples(dataset)
    lengths = (_or_unknown(batches_in(dataset)), _or_unknown(examples), len(generators))
    _check([[int(each) for each in met] for met in workers.exchange(_CALL, lengths)], workers.names)
    states = [default_state(), *(generator.get_state() for generator in generators)] if workers.is_chief else []
    told = workers.chiefs_bytes(f"{_CALL}: the chief's generators", b"".join(map(_packed, states)))
    if not workers.is_chief:
        chiefs = _unpacked(told)
        set_default_state(chiefs[0])
        for generator, state in zip(generators, chiefs[1:], strict=True):
            generator.set_state(state)


def _examples(dataset: Iterable[Any]) -> int | None:
    """How many rows a map-style data set under a DataLoader has: batches alone would hide a few more or less."""
    if isinstance(dataset, DataLoader) and not isinstance(dataset.dataset, IterableDataset):
        return batches_in(dataset.dataset)
    return None


def _or_unknown(length: int | None) -> int:
    return _UNKNOWN if length is None else length


def _check(headers: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    for column, unit in enumerate(("global batches", "examples", "torch.Generators")):
        values = [header[column] for header in headers]
        for name, value in zip(names, values, strict=True):
            if value != values[0]:
                raise ClusterError(
                    f"the workers' data differ: {name} has {_said(value)} {unit}, {names[0]} has {_said(values[0])}; "
                    'give every worker the same data, or distribute it with shard="file" or "off" where each has its '
                    "own"
                )


def _said(value: int) -> str:
    return "an unknown number of" if value == _UNKNOWN else str(value)


def _packed(state: torch.Tensor) -> bytes:
    return _SIZE.pack(state.numel()) + bytes(state.tolist())


def _unpacked(data: bytes) -> list[torch.Tensor]:
    states = []
    while data:
        (size,) = _SIZE.unpack_from(data)
        states.append(torch.tensor(list(data[_SIZE.size : _SIZE.size + size]), dtype=torch.uint8))
        data = data[_SIZE.size + size :]
    return states
