"""How one worker reads a source: batches in, its own replicas' shards of them out.

    BatchReader         reads whole batches and takes this worker's rows of each
    ReplicaRowsReader   loads these rows alone, replica by replica, of a map-style dataset (see ``row_loading``)
    PerReplicaReader    batches that are per-replica already, one for each local replica

``begin`` is called in the consumer's thread; the iterator that it returns runs in the thread that reads ahead.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from lockstep.data.batch_lists import ListReader
from lockstep.data.ragged import tensors_of
from lockstep.data.random_state import all_generators
from lockstep.data.row_sample import Readings, RowSample, SampledRows
from lockstep.data.sharding import LocalRows, join_batches, local_shards
from lockstep.data.sources import batches_in, persists, started
from lockstep.data.structure import is_plain, named_leaves

ToDevices = Callable[[Any], Any]
"""Puts a batch with PerReplica leaves on the replicas' devices."""

_SAMPLED = 16
# Types whose values have the same repr in every process; of other values only the type is compared.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class CheckedBatch(NamedTuple):
    """A worker's part of a global batch, and a digest of the whole batch, which must be equal on all workers."""

    batch: Any
    digest: int


class Reader(ABC):
    """Reads one source. ``list_reader`` finds the lists of rows in its batches."""

    def __init__(self, dataset: Iterable[Any], list_reader: ListReader) -> None:
        self.dataset = dataset
        self.list_reader = list_reader
        self.left_out: Any = None  # the last batch that the iteration begun last left out
        self.sampled: SampledRows | None = None  # since the first iteration, of data that workers read by index

    @property
    def length(self) -> int | None:
        """The number of batches of an iteration, or None if the source does not say."""
        return batches_in(self.dataset)

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators, beside torch's default one, whose states decide what all workers read together."""
        return all_generators(self.dataset)

    @property
    def started(self) -> bool:
        """Whether persistent loading processes run. If so, an iteration draws no seed for them."""
        return started(self.dataset)

    def start(self) -> None:
        """Starts the source's persistent loading processes, if it has any that do not run yet."""
        if persists(self.dataset) and not self.started:
            self.begin(0, lambda batch: batch)

    def read_again(self, sample: RowSample) -> list[Readings]:
        """Reads rows of a dataset that is read by index, for a reader that has ``sampled`` some."""
        raise NotImplementedError

    @abstractmethod
    def begin(self, skip: int, to_devices: ToDevices) -> Iterator[Any]:
        """Begins a new iteration, in the caller's thread; the first ``skip`` batches are left out."""


class BatchReader(Reader):
    """Reads whole batches and takes this worker's rows of each.

    ``rows`` returns this worker's rows, given the number of rows of a batch. ``with_digest``: batches are
    ``CheckedBatch``, because all workers read the same ones.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        list_reader: ListReader,
        rows: Callable[[int], LocalRows],
        *,
        with_digest: bool = False,
    ) -> None:
        super().__init__(dataset, list_reader)
        self._rows = cache(rows)  # nearly all batches have as many rows
        self._with_digest = with_digest

    def begin(self, skip: int, to_devices: ToDevices) -> Iterator[Any]:
        batches = iter(self.dataset)
        last = _leave_out(batches, skip)
        self.left_out = None if last is None else self._shards(last, to_devices)
        return (self._shards(batch, to_devices) for batch in batches)

    def _shards(self, batch: Any, to_devices: ToDevices) -> Any:
        shards = to_devices(local_shards(batch, self._rows, self.list_reader))
        return CheckedBatch(shards, batch_digest(batch)) if self._with_digest else shards


class PerReplicaReader(Reader):
    """Reads batches that are per-replica already, in rounds of one batch for each of ``replicas`` local replicas."""

    def __init__(self, dataset: Iterable[Any], replicas: int, list_reader: ListReader) -> None:
        super().__init__(dataset, list_reader)
        self._replicas = replicas

    @property
    def length(self) -> int | None:
        batches = batches_in(self.dataset)
        return None if batches is None else math.ceil(batches / self._replicas)

    def begin(self, skip: int, to_devices: ToDevices) -> Iterator[Any]:
        batches = iter(self.dataset)
        last = _leave_out(batches, skip * self._replicas)
        self.left_out = None if last is None else to_devices(self._joined([last]))
        rounds = iter(lambda: list(islice(batches, self._replicas)), [])
        return (to_devices(self._joined(batches_of_round)) for batches_of_round in rounds)

    def _joined(self, batches: Sequence[Any]) -> Any:
        return join_batches(batches, self._replicas, self.list_reader)


def _leave_out(batches: Iterator[Any], number: int) -> Any:
    """Reads a number of batches; returns the last one, None if there is none."""
    last = None
    for last in islice(batches, number):  # noqa: B007 - the last one is returned
        pass
    return last


def index_digest(indices: Sequence[Any]) -> int:
    """Returns a 32-bit digest of a batch's indices in the dataset, as a sampler gives them."""
    return zlib.crc32(repr([_printable(index) for index in indices]).encode())


def batch_digest(batch: Any) -> int:
    """Returns a 32-bit digest of a batch's names, shapes, dtypes, single values and a few elements of each tensor.

    It finds workers whose data has another order or length, or comes from another file, in a few microseconds. It is
    no proof that batches are equal.
    """
    digest = 0
    for name, leaf in named_leaves(batch):
        digest = zlib.crc32(f"{name}:{_description(leaf)}".encode(), digest)
        for tensor in [leaf] if is_plain(leaf) else tensors_of(leaf):
            digest = _with_elements(tensor, digest)
    return digest


def _with_elements(tensor: torch.Tensor, digest: int) -> int:
    """The digest with evenly spread elements of a tensor, from the first to the last."""
    if not is_plain(tensor) or not tensor.numel():
        return digest
    last = tensor.numel() - 1
    places = torch.tensor([last * step // (_SAMPLED - 1) for step in range(_SAMPLED)], device=tensor.device)
    return zlib.crc32(bytes(tensor.detach().take(places).cpu().view(torch.uint8).tolist()), digest)


def _printable(index: Any) -> Any:
    if type(index) in _PLAIN:
        return index
    if isinstance(index, (tuple, list)):
        return [_printable(part) for part in index]
    return index.tolist() if isinstance(index, torch.Tensor) else type(index).__name__


def _description(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{leaf.size(0) if leaf.is_nested else tuple(leaf.shape)}"
    return repr(leaf) if type(leaf) in _PLAIN else type(leaf).__name__
