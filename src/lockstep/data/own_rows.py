"""A DataLoader over a map-style data set, of which each worker loads the rows of its own replicas only.

    batch sampler, alike on all workers -> [7 2 9 4 1 8] -> this worker's part [9 4] -> data set, collate_fn -> shards

Where the rows draw random numbers (a random crop), each worker draws its own: the rows of two workers would otherwise
get the same crops. The sampler's numbers are alike on all workers and are left where one worker would have left them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lockstep.collectives.communicator import Workers
from lockstep.data.beginning import batches_in
from lockstep.data.digest import index_digest
from lockstep.data.layout import BatchLayout
from lockstep.data.position import check_skip, sampling_generators
from lockstep.data.prefetch import PASSED_OVER
from lockstep.data.readers import Alike, Place, Reader
from lockstep.data.shards import LocalCut, local_cut, local_shards, shard_sizes
from lockstep.data.skipping import draws_at_first, index_batches, persists, rebuilt
from lockstep.data.source_random import borrowed_default
from lockstep.replicas.rng.state import replica_generator


class OwnRows(Reader):
    """Loads this worker's rows of each global batch.

    Args:
        loader: for which ``loads_by_index`` holds.
        workers: all workers.
        layout: of its batches.
    """

    def __init__(self, loader: DataLoader[Any], workers: Workers, layout: BatchLayout) -> None:
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
                yield PASSED_OVER
            else:
                shards = local_shards(batch, part.cut, self._layout, loaded=part.rows or 1)
                yield Alike(place(shards), part.digest)
                del shards
            del batch
            number += 1


class _Part(NamedTuple):
    """What this worker is to load of a global batch: rows, how its replicas share them, the digest of the batch."""

    rows: int
    sizes: tuple[int, ...]
    digest: int

    def cut(self, loaded: int) -> LocalCut:
        """Of the rows that were loaded. A part of no rows was loaded as one; a collate_fn may make other numbers."""
        if not self.rows:
            return LocalCut(start=0, sizes=self.sizes)
        return LocalCut(start=0, sizes=self.sizes if loaded == self.rows else shard_sizes(loaded, len(self.sizes)))


class _Parts:
    """The batch sampler of the own rows.

    ``seed_due`` says that the next iteration begins with the seed that a DataLoader draws then; ``skip``, how many
    batches it leaves out; ``latest`` is the iteration that was begun last.
    """

    def __init__(self, loader: DataLoader[Any], workers: Workers, rows: torch.Generator) -> None:
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

    def __init__(self, batches: Iterator[Sequence[Any]], workers: Workers, skip: int) -> None:
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
        cut = local_cut(len(indices), self._workers)
        own = indices[cut.start : cut.stop]
        self._parts.append(_Part(len(own), cut.sizes, index_digest(indices)))
        # A part of no rows still has the structure of the others, which only loading a row can tell.
        self._prepared.append(own or indices[:1])
        return True

    def loaded(self) -> _Part:
        """The part that the batch loaded last is of."""
        return self._parts.popleft()
