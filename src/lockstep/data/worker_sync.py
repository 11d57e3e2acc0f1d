"""What the workers have to say to each other while they iterate over data together.

    SameDataSync   begin: lengths compared, the chief's generators for all
                  each batch: its digest rides on the next exchange, whatever that is for
                  end: all have come to it, after as many batches
    OwnDataSync    before each batch an exchange: who has one? Those who have none get an empty one

All of it happens in the consumer's thread, where the batches are handed out, never in the thread that reads ahead:
there the order of the calls would differ between workers.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.collectives.communicator import Communicator
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.prefetch import ClosableIterator
from lockstep.data.readers import CheckedBatch, Place, Reader
from lockstep.data.sharding import with_no_rows
from lockstep.data.source_random import default_state, set_default_state
from lockstep.data.sources import batches_in
from lockstep.data.structure import RowList, RowTuple, is_plain, leaf_has_rows, map_leaves
from lockstep.errors import ClusterError, DataError

_UNKNOWN = -1
_SIZE = struct.Struct("<I")
_CALL = "the beginning of an iteration over the data"


def start_together(workers: Communicator, dataset: Iterable[Any], generators: Sequence[torch.Generator]) -> None:
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
    _check([[int(each) for each in met] for met in workers.all_gather_numbers(_CALL, lengths)], workers.names)
    states = [default_state(), *(generator.get_state() for generator in generators)] if workers.is_chief else []
    told = workers.broadcast_bytes(f"{_CALL}: the chief's generators", b"".join(map(_packed, states)))
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


_DICT, _LIST, _TUPLE, _ROWS, _TENSOR, _VALUE = "dict", "list", "tuple", "rows", "tensor", "value"
_ROW_KINDS: dict[str, type[Any]] = {"row list": RowList, "row tuple": RowTuple}
_VALUES = (bool, int, float, str, type(None))


def without_rows(batch: Any) -> Any:
    """A batch with PerReplica leaves, with 0 rows for every replica."""
    return map_leaves(lambda _, leaf: PerReplica([with_no_rows(value) for value in leaf]), batch)


def packed(batch: Any) -> bytes:
    """Replica 0's part of a batch with PerReplica leaves, without its rows.

    Raises:
        DataError: the batch has a named tuple, a key or a value that JSON has not.
    """
    return json.dumps(_described(batch)).encode()


def unpacked(payload: bytes, replicas: int) -> Any:
    """The batch of 0 rows for each of ``replicas`` local replicas, in host memory."""
    return map_leaves(lambda _, leaf: PerReplica([leaf] * replicas), _built(json.loads(payload)))


def _described(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        if not all(isinstance(key, (str, int)) for key in node):
            raise _unsendable(f"keys such as {next(iter(node))!r}")
        return [_DICT, [[key, _described(child)] for key, child in node.items()]]
    if type(node) in (list, tuple):
        return [_LIST if type(node) is list else _TUPLE, [_described(child) for child in node]]
    return _described_leaf(node[0] if isinstance(node, PerReplica) else node)


def _described_leaf(leaf: Any) -> list[Any]:
    if type(leaf) in _ROW_KINDS.values():
        return [next(kind for kind, made in _ROW_KINDS.items() if type(leaf) is made)]
    if leaf_has_rows(leaf) and not is_plain(leaf):
        raise _unsendable(f"a {type(leaf).__name__} that is sparse, nested or packed")
    if leaf_has_rows(leaf):
        return [_ROWS, _name(leaf.dtype), [0, *leaf.shape[1:]]]
    if isinstance(leaf, torch.Tensor) and not leaf.is_complex():
        return [_TENSOR, _name(leaf.dtype), leaf.item()]
    if isinstance(leaf, _VALUES):
        return [_VALUE, leaf]
    raise _unsendable(f"a {type(leaf).__name__}")


def _built(node: list[Any]) -> Any:
    kind, *content = node
    if kind == _DICT:
        return {key: _built(child) for key, child in content[0]}
    if kind in (_LIST, _TUPLE):
        children = [_built(child) for child in content[0]]
        return children if kind == _LIST else tuple(children)
    if kind == _VALUE:
        return content[0]
    if kind in _ROW_KINDS:
        return _ROW_KINDS[kind]()
    name, value = content
    dtype = getattr(torch, name)
    return torch.empty(value, dtype=dtype) if kind == _ROWS else torch.tensor(value, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unsendable(what: str) -> DataError:
    return DataError(
        f"a worker has no batch, and the structure of the others' cannot be sent to it: it has {what}; make batches of "
        "tuples, lists and dicts with tensors, numbers and strings, or give every worker data"
    )


class WorkerSync(ABC):
    """How the workers keep together while they iterate over one source."""

    @abstractmethod
    def begin(self, reader: Reader) -> None:
        """Called on every worker when an iteration begins, before that of the source."""

    @abstractmethod
    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches as the consumer gets them."""

    @abstractmethod
    def length(self, reader: Reader) -> int | None:
        """The number of batches that the consumer gets, or None where it is unknown."""


class NoSync(WorkerSync):
    """One worker: nobody to meet."""

    def begin(self, reader: Reader) -> None:
        """Nothing has to be said."""

    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches as they are."""
        return batches

    def length(self, reader: Reader) -> int | None:
        """The reader's."""
        return reader.length


class SameDataSync(WorkerSync):
    """All workers read the same global batches, and each gets its part."""

    def __init__(self, workers: Communicator) -> None:
        self._workers = workers

    def begin(self, reader: Reader) -> None:
        """Compares the lengths and takes the chief's generators."""
        start_together(self._workers, reader.dataset, reader.generators)

    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches, whose digests are compared; they must end on all workers together."""
        return _Compared(batches, self._workers)

    def length(self, reader: Reader) -> int | None:
        """The reader's, which is every worker's."""
        return reader.length


class OwnDataSync(WorkerSync):
    """Each worker reads batches of its own; the iteration ends when the last one has ended.

    Args:
        workers: all workers, every one of which makes this object.
        reader: this worker's.
    """

    def __init__(self, workers: Communicator, reader: Reader) -> None:
        self._workers = workers
        own = _UNKNOWN if reader.length is None else reader.length
        lengths = [length for (length,) in workers.all_gather_numbers("the lengths of the workers' own data", (own,))]
        self._longest = None if _UNKNOWN in lengths else int(max(lengths))

    def begin(self, reader: Reader) -> None:
        """Nothing has to be alike."""

    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches, and empty ones while others still have some."""
        return _Padded(batches, self._workers, place)

    def length(self, reader: Reader) -> int | None:
        """The longest of all workers', as it was when this was made."""
        return self._longest


class _Compared:
    def __init__(self, batches: ClosableIterator[CheckedBatch], workers: Communicator) -> None:
        self._batches = batches
        self._workers = workers
        self._taken = 0
        self._ended = False

    def __iter__(self) -> _Compared:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._workers.set_status(f"the wait for batch {self._taken} of its data")
        handed = next(self._batches, None)
        if handed is None:
            self._ended = True
            self._workers.all_gather_numbers(f"the end of the data, after {self._taken} global batches")
            raise StopIteration
        self._taken += 1
        self._workers.add_digest(handed.digest)
        return handed.batch

    def close(self) -> None:
        """Ends the reading; the other workers are expected to do so at the same place."""
        self._ended = True
        self._batches.close()


class _Padded:
    def __init__(self, batches: ClosableIterator[Any], workers: Communicator, place: Place) -> None:
        self._batches = batches
        self._workers = workers
        self._place = place
        self._empty: Any = None
        self._taken = 0
        self._ended = self._all_ended = False

    def __iter__(self) -> _Padded:
        return self

    def __next__(self) -> Any:
        if self._all_ended:
            raise StopIteration
        batch = self._own()
        met = self._workers.all_gather_numbers(
            "the next batch of the workers' own data", (not self._ended, self._empty is not None)
        )
        if not any(has for has, _ in met):
            self._all_ended = True
            raise StopIteration
        if not all(knows for _, knows in met):
            self._learn([bool(has) for has, _ in met].index(True))
        self._taken += 1
        return self._empty if self._ended else batch

    def close(self) -> None:
        """Ends the reading; the other workers are expected to do so at the same place."""
        self._ended = self._all_ended = True
        self._batches.close()

    def _own(self) -> Any:
        if self._ended:
            return None
        self._workers.set_status(f"the wait for batch {self._taken} of its own data")
        batch = next(self._batches, None)
        self._ended = batch is None
        if batch is not None and self._empty is None:
            self._empty = without_rows(batch)
        return batch

    def _learn(self, teacher: int) -> None:
        """Gives the structure of a batch to those workers that never had one."""
        payload = packed(self._empty) if teacher == self._workers.index else b""
        everyones = self._workers.all_gather_bytes("the structure of a batch", payload)
        if self._empty is None:
            replicas = self._workers.replicas[self._workers.index]
            self._empty = self._place(unpacked(everyones[teacher], replicas))
