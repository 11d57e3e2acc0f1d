"""How one worker reads a source: batches in, its own replicas' shards of them out.

    LocalReader   each batch divided among the local replicas: one worker, or data of each worker's own
    PerReplicaReader         batches that are per-replica already, one for each local replica
    SlicingReader     every worker reads the same global batches whole, and cuts its part out of each
    IndexShardedReader        the same, but only the part is loaded (``own_rows``)

A reader runs in the thread that reads ahead, but for ``begin``.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lockstep.collectives.communicator import Communicator
from lockstep.data.layout import BatchLayout
from lockstep.data.prefetch import SKIPPED
from lockstep.data.resume import all_generators, check_skip, passing_over, sampling_generators
from lockstep.data.sharding import LocalRows, join_batches, local_rows, local_shards, per_replica_batch, shard_sizes
from lockstep.data.source_random import borrowed_default
from lockstep.data.sources import (
    batches_in,
    draws_at_first,
    index_batches,
    iterate_from,
    persists,
    rebuilt,
    start,
    started,
)
from lockstep.data.structure import is_plain, named_leaves
from lockstep.replicas.rng.state import replica_generator

_SAMPLED = 16
# What is written alike in every process; of other indices only the type is compared.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def index_digest(indices: Sequence[Any]) -> int:
    """Of a batch's indices in the data set, as a sampler gives them: 32 bits."""
    return zlib.crc32(repr([_written(index) for index in indices]).encode())


def batch_digest(batch: Any) -> int:
    """Of a batch's names, shapes, dtypes and single values, and of a few elements of each tensor: 32 bits."""
    digest = 0
    for name, leaf in named_leaves(batch):
        digest = zlib.crc32(f"{name}:{_looks(leaf)}".encode(), digest)
        if isinstance(leaf, torch.Tensor):
            digest = zlib.crc32(_sample(leaf), digest)
    return digest


def _written(index: Any) -> Any:
    if type(index) in _PLAIN:
        return index
    if isinstance(index, (tuple, list)):
        return [_written(each) for each in index]
    return index.tolist() if isinstance(index, torch.Tensor) else type(index).__name__


def _looks(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{leaf.size(0) if leaf.is_nested else tuple(leaf.shape)}"
    return repr(leaf) if type(leaf) in _PLAIN else type(leaf).__name__


def _sample(tensor: torch.Tensor) -> bytes:
    """Elements from the first to the last, evenly spread, as bytes. Nothing is copied but these."""
    if not is_plain(tensor) or not tensor.numel():
        return b""
    last = tensor.numel() - 1
    places = [last * step // (_SAMPLED - 1) for step in range(_SAMPLED)]
    taken = tensor.detach().take(torch.tensor(places, device=tensor.device))
    return bytes(taken.cpu().view(torch.uint8).tolist())


Place = Callable[[Any], Any]
"""Puts a batch with PerReplica leaves on the replicas' devices."""


class CheckedBatch(NamedTuple):
    """A worker's part of a batch that all workers share, and the digest of that batch."""

    batch: Any
    digest: int


class Reader(ABC):
    """Reads one source.

    Args:
        dataset: the source.
        layout: of its batches.
    """

    def __init__(self, dataset: Iterable[Any], layout: BatchLayout) -> None:
        self._dataset = dataset
        self._layout = layout

    @property
    def dataset(self) -> Iterable[Any]:
        """The source."""
        return self._dataset

    @property
    @abstractmethod
    def length(self) -> int | None:
        """The number of batches of an iteration, or None where the source does not say."""

    @property
    @abstractmethod
    def generators(self) -> list[torch.Generator]:
        """Those that must stand alike on all workers when an iteration begins, beside torch's default one."""

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether persistent loading processes run: an iteration draws no seed for them any more."""

    @abstractmethod
    def start(self) -> None:
        """Starts persistent loading processes, where the data has them, if they do not run."""

    @abstractmethod
    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        """A new iteration, begun here and now in the caller's thread.

        The first ``skip`` batches are SKIPPED or not there at all, and all that the source draws comes out as if
        they had been taken.
        """


class _OwnSource(Reader):
    """A source that is this worker's alone: nothing in it must stand as on other workers.

    Args:
        dataset: the source.
        replicas: how many local replicas there are.
        layout: of its batches.
    """

    def __init__(self, dataset: Iterable[Any], replicas: int, layout: BatchLayout) -> None:
        super().__init__(dataset, layout)
        self._replicas = replicas

    @property
    def generators(self) -> list[torch.Generator]:
        return []

    @property
    def started(self) -> bool:
        return started(self._dataset)

    def start(self) -> None:
        start(self._dataset)


class LocalReader(_OwnSource):
    """Batches that are all this worker's, divided among its replicas."""

    @property
    def length(self) -> int | None:
        return batches_in(self._dataset)

    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        source, replicas, layout = iterate_from(self._dataset, skip), self._replicas, self._layout
        return (batch if batch is SKIPPED else place(per_replica_batch(batch, replicas, layout)) for batch in source)


class PerReplicaReader(_OwnSource):
    """Batches that are per-replica already: a round of them is one for each local replica."""

    @property
    def length(self) -> int | None:
        batches = batches_in(self._dataset)
        return None if batches is None else math.ceil(batches / self._replicas)

    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        replicas, layout = self._replicas, self._layout
        rounds = passing_over(skip, _rounds(iter(self._dataset), replicas))
        return (each if each is SKIPPED else place(join_batches(each, replicas, layout)) for each in rounds)


class SlicingReader(Reader):
    """Global batches that every worker reads whole.

    Args:
        dataset: the source.
        workers: all workers.
        layout: of its batches.
    """

    def __init__(self, dataset: Iterable[Any], workers: Communicator, layout: BatchLayout) -> None:
        super().__init__(dataset, layout)
        self._workers = workers

    @property
    def length(self) -> int | None:
        return batches_in(self._dataset)

    @property
    def generators(self) -> list[torch.Generator]:
        return all_generators(self._dataset)

    @property
    def started(self) -> bool:
        return started(self._dataset)

    def start(self) -> None:
        start(self._dataset)

    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        source = iterate_from(self._dataset, skip)
        return (batch if batch is SKIPPED else self._part(batch, place) for batch in source)

    def _part(self, batch: Any, place: Place) -> CheckedBatch:
        shards = local_shards(batch, lambda rows: local_rows(rows, self._workers), self._layout)
        return CheckedBatch(place(shards), batch_digest(batch))


def _rounds(source: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batches := list(islice(source, size)):
        yield batches


class IndexShardedReader(Reader):
    """Loads this worker's rows of each global batch.

    Args:
        loader: for which ``loads_by_index`` holds.
        workers: all workers.
        layout: of its batches.
    """

    def __init__(self, loader: DataLoader[Any], workers: Communicator, layout: BatchLayout) -> None:
        super().__init__(loader, layout)
        self._loader = loader
        self._rows = torch.Generator()
        self._parts = _Parts(loader, workers, self._rows)
        self._own: DataLoader[Any] | None = None

    @property
    def length(self) -> int | None:
        return batches_in(self._loader)

    @property
    def generators(self) -> list[torch.Generator]:
        return sampling_generators(self._loader)

    @property
    def started(self) -> bool:
        return self._own is not None and persists(self._own)

    def start(self) -> None:
        if persists(self._loader) and not self.started:
            self.begin(0, lambda batch: batch)

    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        check_skip(skip)
        at_sampler = skip if draws_at_first(self._loader) else 0
        # Persistent processes keep the seed that they were started with.
        self._parts.seed_due = self._own is None or not self._loader.persistent_workers
        self._parts.skip = at_sampler
        if self._own is None:
            self._own = rebuilt(self._loader, self._parts, self._rows)
        loaded = iter(self._own)
        return self._read(loaded, self._parts.latest, skip - at_sampler, place)

    def _read(self, loaded: Iterator[Any], cuts: _Cuts, skip: int, place: Place) -> Iterator[Any]:
        in_processes = self._loader.num_workers > 0
        number = 0
        while in_processes or cuts.prepare():
            drawing: AbstractContextManager[None] = nullcontext() if in_processes else borrowed_default(self._rows)
            try:
                with drawing:
                    batch = next(loaded)
            except StopIteration:
                return
            part = cuts.loaded()
            if number < skip:
                yield SKIPPED
            else:
                shards = local_shards(batch, part.cut, self._layout, loaded=part.rows or 1)
                yield CheckedBatch(place(shards), part.digest)
                del shards
            del batch
            number += 1


class _Part(NamedTuple):
    """What this worker is to load of a global batch: rows, how its replicas share them, the digest of the batch."""

    rows: int
    sizes: tuple[int, ...]
    digest: int

    def cut(self, loaded: int) -> LocalRows:
        """Of the rows that were loaded. A part of no rows was loaded as one; a collate_fn may make other numbers."""
        if not self.rows:
            return LocalRows(start=0, sizes=self.sizes)
        return LocalRows(start=0, sizes=self.sizes if loaded == self.rows else shard_sizes(loaded, len(self.sizes)))


class _Parts:
    """The batch sampler of the own rows.

    ``seed_due`` says that the next iteration begins with the seed that a DataLoader draws then; ``skip``, how many
    batches it leaves out; ``latest`` is the iteration that was begun last.
    """

    def __init__(self, loader: DataLoader[Any], workers: Communicator, rows: torch.Generator) -> None:
        self._loader = loader
        self._workers = workers
        self._rows = rows
        self.seed_due = False
        self.skip = 0

    def __iter__(self) -> Iterator[list[Any]]:
        # With processes a DataLoader does this twice as it begins; the seed is drawn after the first time.
        batches = iter(index_batches(self._loader))
        if self.seed_due:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator).item())
            self._rows.set_state(replica_generator(seed, self._workers.index).get_state())
            self.seed_due = False
        self.latest = _Cuts(batches, self._workers, self.skip)
        return self.latest


class _Cuts:
    """The indices of the own rows, batch after batch; read in the order in which the batches are loaded."""

    def __init__(self, batches: Iterator[Sequence[Any]], workers: Communicator, skip: int) -> None:
        self._batches = batches
        self._workers = workers
        self._skip = skip
        self._prepared: deque[list[Any]] = deque()
        self._parts: deque[_Part] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        if not self._prepared and not self.prepare():
            raise StopIteration
        return self._prepared.popleft()

    def prepare(self) -> bool:
        """Draws the next batch's indices before they are asked for; False if there is none."""
        while self._skip:
            self._skip -= 1
            next(self._batches, None)
        batch = next(self._batches, None)
        if batch is None:
            return False
        indices = list(batch)
        cut = local_rows(len(indices), self._workers)
        own = indices[cut.start : cut.stop]
        self._parts.append(_Part(len(own), cut.sizes, index_digest(indices)))
        # A part of no rows still has the structure of the others, which only loading a row can tell.
        self._prepared.append(own or indices[:1])
        return True

    def loaded(self) -> _Part:
        """The part that the batch loaded last is of."""
        return self._parts.popleft()
