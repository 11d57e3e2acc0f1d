"""What the workers tell each other while they iterate over data together.

    SameDataSync   begin: compare the lengths of the data; all take the chief's generator states
                   each batch: its digest is compared in the next exchange, whatever that is for
                   end: all workers have come to it, after the same number of batches
    OwnDataSync    before each batch: who has one? Workers without one get an empty batch

Everything here runs in the consumer's thread, where batches are handed out, never in the thread that reads ahead:
there the order of the collectives would differ between workers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.prefetch import ClosableIterator
from lockstep.data.readers import CheckedBatch, ToDevices
from lockstep.data.sharding import with_no_rows
from lockstep.data.source_random import default_state, set_default_state
from lockstep.data.sources import batches_in
from lockstep.data.structure import RowList, RowTuple, is_plain, leaf_has_rows, map_leaves
from lockstep.errors import ClusterError, DataError

_UNKNOWN = -1
_BEGIN = "the beginning of an iteration over the data"


class WorkerSync(ABC):
    """Keeps the workers in step while they iterate over one source. Every worker must make the same calls."""

    @abstractmethod
    def begin(self) -> None:
        """Is called when an iteration begins, before the source's own iteration begins."""

    @abstractmethod
    def wrap(self, batches: ClosableIterator[Any], to_devices: ToDevices) -> ClosableIterator[Any]:
        """Returns the batches as the consumer gets them."""

    @abstractmethod
    def length(self, own: int | None) -> int | None:
        """Returns the number of batches that the consumer gets if the reader gives ``own``. None is unknown."""


class NoSync(WorkerSync):
    """For one worker alone."""

    def begin(self) -> None:
        """Does nothing."""

    def wrap(self, batches: ClosableIterator[Any], to_devices: ToDevices) -> ClosableIterator[Any]:
        return batches

    def length(self, own: int | None) -> int | None:
        return own


class SameDataSync(WorkerSync):
    """For workers that all read the same global batches, each taking its part.

    Args:
        workers: all workers.
        dataset: this worker's data.
        generators: returns the generators that must have the chief's states, beside torch's default one.
    """

    def __init__(
        self, workers: Communicator, dataset: Iterable[Any], generators: Callable[[], Sequence[torch.Generator]]
    ) -> None:
        self._workers = workers
        self._dataset = dataset
        self._generators = generators

    def begin(self) -> None:
        start_together(self._workers, self._dataset, self._generators())

    def wrap(self, batches: ClosableIterator[Any], to_devices: ToDevices) -> ClosableIterator[Any]:
        return _ComparedBatches(batches, self._workers)

    def length(self, own: int | None) -> int | None:
        return own


class OwnDataSync(WorkerSync):
    """For workers that each read their own batches. The iteration ends when the last worker's data has ended.

    Args:
        workers: all workers, every one of which makes this object.
        length: the number of this worker's batches, or None if it is unknown.
    """

    def __init__(self, workers: Communicator, length: int | None) -> None:
        self._workers = workers
        lengths = [
            each for (each,) in workers.all_gather_numbers("the lengths of the workers' own data", (_known(length),))
        ]
        self._longest = None if _UNKNOWN in lengths else int(max(lengths))

    def begin(self) -> None:
        """Does nothing: nothing has to be equal."""

    def wrap(self, batches: ClosableIterator[Any], to_devices: ToDevices) -> ClosableIterator[Any]:
        return _PaddedBatches(batches, self._workers, to_devices)

    def length(self, own: int | None) -> int | None:
        """Returns the length of the longest worker's data when this object was made."""
        return self._longest


def start_together(workers: Communicator, dataset: Iterable[Any], generators: Sequence[torch.Generator]) -> None:
    """Compares the data of all workers, and gives their generators the chief's states. Every worker must call it.

    Args:
        workers: all workers.
        dataset: this worker's data.
        generators: the generators that must have the chief's states, beside torch's default one.

    Raises:
        ClusterError: a worker's data has another length, or other generators, than the chief's.
    """
    lengths = (_known(batches_in(dataset)), _known(_examples(dataset)), len(generators))
    _check_equal([[int(each) for each in row] for row in workers.all_gather_numbers(_BEGIN, lengths)], workers.names)
    states = [default_state(), *(generator.get_state() for generator in generators)] if workers.is_chief else []
    default, *others = all_gather_object(workers.processes, f"{_BEGIN}: the chief's generators", states)[0]
    if not workers.is_chief:
        set_default_state(default)
        for generator, state in zip(generators, others, strict=True):
            generator.set_state(state)


def _examples(dataset: Iterable[Any]) -> int | None:
    """The number of rows of the map-style dataset under a DataLoader: equal numbers of batches may hide a few more."""
    if isinstance(dataset, DataLoader) and not isinstance(dataset.dataset, IterableDataset):
        return batches_in(dataset.dataset)
    return None


def _known(length: int | None) -> int:
    return _UNKNOWN if length is None else length


def _check_equal(lengths: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    for column, unit in enumerate(("global batches", "examples", "torch.Generators")):
        values = [row[column] for row in lengths]
        for name, value in zip(names, values, strict=True):
            if value != values[0]:
                raise ClusterError(
                    f"the workers' data differ: {name} has {_shown(value)} {unit}, {names[0]} has {_shown(values[0])}; "
                    'give every worker the same data, or distribute it with shard="file" or "off" where each has its '
                    "own"
                )


def _shown(value: int) -> str:
    return "an unknown number of" if value == _UNKNOWN else str(value)


class _ComparedBatches:
    """Batches whose digests are compared between the workers, and which must end on all workers together."""

    def __init__(self, batches: ClosableIterator[CheckedBatch], workers: Communicator) -> None:
        self._batches = batches
        self._workers = workers
        self._taken = 0
        self._ended = False

    def __iter__(self) -> _ComparedBatches:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._workers.set_status(f"the wait for batch {self._taken} of its data")
        checked = next(self._batches, None)
        if checked is None:
            self._ended = True
            self._workers.all_gather_numbers(f"the end of the data, after {self._taken} global batches")
            raise StopIteration
        self._taken += 1
        self._workers.add_digest(checked.digest)
        return checked.batch

    def close(self) -> None:
        """Stops reading. The other workers are expected to stop at the same batch."""
        self._ended = True
        self._batches.close()


class _PaddedBatches:
    """This worker's batches, then empty batches while other workers still have some."""

    def __init__(self, batches: ClosableIterator[Any], workers: Communicator, to_devices: ToDevices) -> None:
        self._batches = batches
        self._workers = workers
        self._to_devices = to_devices
        self._empty: Any = None
        self._taken = 0
        self._ended = self._all_ended = False

    def __iter__(self) -> _PaddedBatches:
        return self

    def __next__(self) -> Any:
        if self._all_ended:
            raise StopIteration
        batch = self._read()
        answers = self._workers.all_gather_numbers(
            "the next batch of the workers' own data", (not self._ended, self._empty is not None)
        )
        if not any(has for has, _ in answers):
            self._all_ended = True
            raise StopIteration
        if not all(knows for _, knows in answers):
            self._share_structure([bool(has) for has, _ in answers].index(True))
        self._taken += 1
        return self._empty if self._ended else batch

    def close(self) -> None:
        """Stops reading. The other workers are expected to stop at the same batch."""
        self._ended = self._all_ended = True
        self._batches.close()

    def _read(self) -> Any:
        if self._ended:
            return None
        self._workers.set_status(f"the wait for batch {self._taken} of its own data")
        batch = next(self._batches, None)
        self._ended = batch is None
        if batch is not None and self._empty is None:
            self._empty = map_leaves(lambda _, leaf: PerReplica([with_no_rows(value) for value in leaf]), batch)
        return batch

    def _share_structure(self, sender: int) -> None:
        """Sends one worker's empty batch to the workers that never had a batch."""
        payload = _to_json(self._empty) if sender == self._workers.index else b""
        payloads = self._workers.all_gather_bytes("the structure of a batch", payload)
        if self._empty is None:
            replicas = self._workers.replicas[self._workers.index]
            empty = _decoded(json.loads(payloads[sender]))
            self._empty = self._to_devices(map_leaves(lambda _, leaf: PerReplica([leaf] * replicas), empty))


# An empty batch as JSON: structure, dtypes and shapes of replica 0's part, and its single values. JSON, since what
# comes from another process must not be able to run code.

_DICT, _LIST, _TUPLE, _ROWS, _TENSOR, _VALUE = "dict", "list", "tuple", "rows", "tensor", "value"
_ROW_KINDS: dict[str, type[Any]] = {"row list": RowList, "row tuple": RowTuple}


def _to_json(batch: Any) -> bytes:
    """Encodes a batch with PerReplica leaves.

    Raises:
        DataError: the batch holds a named tuple, a key or a value that cannot be sent.
    """
    return json.dumps(_encoded(batch)).encode()


def _encoded(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        if not all(isinstance(key, (str, int)) for key in node):
            raise _not_sendable(f"keys such as {next(iter(node))!r}")
        return [_DICT, [[key, _encoded(child)] for key, child in node.items()]]
    if type(node) in (list, tuple):
        return [_LIST if type(node) is list else _TUPLE, [_encoded(child) for child in node]]
    return _encoded_leaf(node[0] if isinstance(node, PerReplica) else node)


def _encoded_leaf(leaf: Any) -> list[Any]:
    for name, kind in _ROW_KINDS.items():
        if type(leaf) is kind:
            return [name]
    if leaf_has_rows(leaf):
        if not is_plain(leaf):
            raise _not_sendable(f"a {type(leaf).__name__} that is sparse, nested or packed")
        return [_ROWS, _name(leaf.dtype), [0, *leaf.shape[1:]]]
    if isinstance(leaf, torch.Tensor) and not leaf.is_complex():
        return [_TENSOR, _name(leaf.dtype), leaf.item()]
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return [_VALUE, leaf]
    raise _not_sendable(f"a {type(leaf).__name__}")


def _decoded(node: list[Any]) -> Any:
    kind, *content = node
    if kind == _DICT:
        return {key: _decoded(child) for key, child in content[0]}
    if kind in (_LIST, _TUPLE):
        children = [_decoded(child) for child in content[0]]
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


def _not_sendable(what: str) -> DataError:
    return DataError(
        f"a worker has no batch, and the structure of the other workers' batches cannot be sent to it: it has {what}; "
        "make batches of tuples, lists and dicts with tensors, numbers and strings, or give every worker data"
    )
