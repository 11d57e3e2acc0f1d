"""How one worker reads a source: batches in, its own replicas' shards of them out.

    LocalBatches   each batch divided among the local replicas: one worker, or data of each worker's own
    Rounds         batches that are per-replica already, one for each local replica
    CutBatches     every worker reads the same global batches whole, and cuts its part out of each
    OwnRows        the same, but only the part is loaded (``own_rows``)

A reader runs in the thread that reads ahead, but for ``begin``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from lockstep.collectives.communicator import Workers
from lockstep.data.beginning import batches_in
from lockstep.data.digest import batch_digest
from lockstep.data.layout import BatchLayout
from lockstep.data.position import all_generators, passing_over
from lockstep.data.prefetch import PASSED_OVER
from lockstep.data.shards import join_batches, local_cut, local_shards, per_replica_batch
from lockstep.data.skipping import begun_later, start, started

Place = Callable[[Any], Any]
"""Puts a batch with PerReplica leaves on the replicas' devices."""


class Alike(NamedTuple):
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

        The first ``skip`` batches are PASSED_OVER or not there at all, and all that the source draws comes out as if
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


class LocalBatches(_OwnSource):
    """Batches that are all this worker's, divided among its replicas."""

    @property
    def length(self) -> int | None:
        return batches_in(self._dataset)

    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        source, replicas, layout = begun_later(self._dataset, skip), self._replicas, self._layout
        return (
            batch if batch is PASSED_OVER else place(per_replica_batch(batch, replicas, layout)) for batch in source
        )


class Rounds(_OwnSource):
    """Batches that are per-replica already: a round of them is one for each local replica."""

    @property
    def length(self) -> int | None:
        batches = batches_in(self._dataset)
        return None if batches is None else math.ceil(batches / self._replicas)

    def begin(self, skip: int, place: Place) -> Iterator[Any]:
        replicas, layout = self._replicas, self._layout
        rounds = passing_over(skip, _rounds(iter(self._dataset), replicas))
        return (each if each is PASSED_OVER else place(join_batches(each, replicas, layout)) for each in rounds)


class CutBatches(Reader):
    """Global batches that every worker reads whole.

    Args:
        dataset: the source.
        workers: all workers.
        layout: of its batches.
    """

    def __init__(self, dataset: Iterable[Any], workers: Workers, layout: BatchLayout) -> None:
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
        source = begun_later(self._dataset, skip)
        return (batch if batch is PASSED_OVER else self._part(batch, place) for batch in source)

    def _part(self, batch: Any, place: Place) -> Alike:
        shards = local_shards(batch, lambda rows: local_cut(rows, self._workers), self._layout)
        return Alike(place(shards), batch_digest(batch))


def _rounds(source: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batches := list(islice(source, size)):
        yield batches
