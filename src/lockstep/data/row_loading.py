"""Loads and collates the rows of each replica by themselves, so that nothing depends on where the replicas are.

    batch sampler -> [7 2 9 4 1] -> replica 0: [7 2], seed -> dataset, collate_fn -> shard, padded by itself
                                    replica 1: [9 4], seed -> dataset, collate_fn -> shard
                                    replica 2: [1],   seed -> dataset, collate_fn -> shard

Several workers read a DataLoader over a map-style dataset so, and with ``replicas=`` one process does too, with
``num_workers=0`` as with processes. What loading draws follows from the seed of the iteration, the number of the global
batch and that of the replica. Batches that are passed over are therefore not loaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.collectives.communicator import Communicator
from lockstep.data.batch_lists import ListReader
from lockstep.data.random_state import generators_of, numpy_state
from lockstep.data.readers import CheckedBatch, Reader, ToDevices, index_digest
from lockstep.data.row_sample import (
    Readings,
    RowSample,
    SampledRows,
    choose_rows,
    describe_row,
    has_known_keys,
)
from lockstep.data.sharding import join_shards, shard_sizes
from lockstep.data.sources import drawn_seed, persists
from lockstep.replicas.rng.default_generator import own_generator
from lockstep.replicas.rng.generators import derived_seed

_OF_PROCESSES = (
    *("num_workers", "pin_memory", "timeout", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""The arguments of a DataLoader that say in which processes it loads, and how these hand over what they loaded."""
_MOST_OBJECTS, _MOST_ITEMS = 10_000, 100  # looked at for generators: not all items of a dataset in memory


class _ReplicaRows(NamedTuple):
    """The rows of one replica's shard, as indices in the dataset, and the seed of what loading them draws.

    ``empty``: the shard has no row, and one is loaded to show its structure.
    """

    indices: list[Any]
    seed: int
    empty: bool


class _Part(NamedTuple):
    """One worker's part of a global batch: the rows of its replicas, and the digest of all indices of the batch."""

    replicas: tuple[_ReplicaRows, ...]
    digest: int


class _LoadedPart(NamedTuple):
    """A part that was loaded: one collated batch for each local replica, and whether its shard is empty."""

    batches: list[Any]
    empty: list[bool]
    digest: int


class ReplicaRowsReader(Reader):
    """Loads, from a DataLoader over a map-style dataset, the rows of this worker's replicas, replica by replica.

    With one worker it gives batches, with several ``CheckedBatch``.
    """

    def __init__(self, loader: DataLoader[Any], workers: Communicator, list_reader: ListReader) -> None:
        super().__init__(loader, list_reader)
        self._loader, self._workers = loader, workers
        self._rows = _SeededRows(loader.dataset, loader.collate_fn)
        self._sampler = _PartSampler()
        self._process_seeds = torch.Generator()  # not the caller's: what processes draw is seeded with each part
        self._process_loader: DataLoader[Any] | None = None  # with processes
        self._seed: int | None = None
        self._sample: RowSample | None = None

    @property
    def started(self) -> bool:
        # With ``replicas=`` every iteration draws a seed, with persistent processes too.
        return persists(self._loader) and self._seed is not None and not self._workers.any_layout

    def begin(self, skip: int, to_devices: ToDevices) -> Iterator[Any]:
        parts = self._begin_parts(skip)
        sample = self._sample if self.sampled is None else None
        loaded = self._load_in_processes(parts, sample) if self._loader.num_workers else map(self._rows.load, parts)
        if sample is not None:
            # The first process reads them beside the first batches; else this thread does, before any that reads ahead.
            readings: Any = next(loaded) if self._loader.num_workers else self._rows.read(sample)
            self.sampled = SampledRows(sample, index_digest(sample.keys), [again[0] for again in readings])
        return self._shards(loaded, to_devices)

    def read_again(self, sample: RowSample) -> list[Readings]:
        if not self._loader.num_workers:
            return self._rows.read(sample)
        # In a process too: a dataset may open its files when it is first read, and these belong to one process.
        loader: DataLoader[Any] = DataLoader(
            self._rows,
            batch_sampler=[sample],  # type: ignore[list-item]  # its items are samples, not indices
            generator=torch.Generator(),
            collate_fn=_unchanged,
            worker_init_fn=partial(_begin_process, self._loader.worker_init_fn),
            num_workers=1,
            multiprocessing_context=self._loader.multiprocessing_context,
        )
        return next(iter(loader))

    def _begin_parts(self, skip: int) -> Iterator[_Part]:
        sampler: Any = self._loader.batch_sampler
        batches = iter(sampler)
        if self._seed is not None and self.started:  # a DataLoader draws nothing for processes that run already
            seed = derived_seed(self._seed)
        else:
            seed = drawn_seed(self._loader.generator)
        self._seed = seed
        self._process_seeds.manual_seed(seed)
        # The sampler is asked for what is passed over, so that it draws as it did; no row of it is loaded
        # (test_what_is_passed_over_is_not_loaded).
        for _ in islice(batches, skip):
            pass
        if self._sample is None and not self._workers.is_single:
            first = [] if has_known_keys(self._loader) else list(islice(batches, 1))
            batches = chain(first, batches)
            sample = choose_rows(self._loader, list(first[0]) if first else [], seed)
            self._sample = sample if sample.keys else None
        return (self._part(list(indices), seed, number) for number, indices in enumerate(batches, skip))

    def _part(self, indices: list[Any], seed: int, batch: int) -> _Part:
        workers = self._workers
        blocks = list(pairwise(accumulate(shard_sizes(len(indices), workers.num_replicas), initial=0)))
        first, number = workers.first_replica, workers.replicas[workers.index]
        replicas = tuple(
            # An empty shard loads one row, to have the structure of the others
            # (test_shards_without_rows_have_the_structure_of_the_others).
            _ReplicaRows(indices[start:stop] or indices[:1], derived_seed(seed, batch, replica), start == stop)
            for replica, (start, stop) in enumerate(blocks[first : first + number], first)
        )
        return _Part(replicas, 0 if workers.is_single else index_digest(indices))

    def _load_in_processes(self, parts: Iterator[_Part], sample: RowSample | None) -> Iterator[Any]:
        if self._process_loader is None:
            self._process_loader = DataLoader(
                self._rows,
                batch_sampler=self._sampler,  # type: ignore[arg-type]  # its items are parts, not indices
                generator=self._process_seeds,
                collate_fn=_unchanged,
                worker_init_fn=partial(_begin_process, self._loader.worker_init_fn),
                **{name: getattr(self._loader, name) for name in _OF_PROCESSES},
            )
        self._sampler.parts = parts if sample is None else chain([sample], parts)
        return iter(self._process_loader)

    def _shards(self, loaded: Iterator[_LoadedPart], to_devices: ToDevices) -> Iterator[Any]:
        for part in loaded:
            shards = join_shards(part.batches, part.empty, self.list_reader)
            digest = part.digest
            del part
            yield to_devices(shards) if self._workers.is_single else CheckedBatch(to_devices(shards), digest)
            del shards  # while the next one is made


class _PartSampler:
    """The batch sampler of the DataLoader with processes, which begins it twice: the newest iteration."""

    def __init__(self) -> None:
        self.parts: Iterator[_Part | RowSample] = iter(())

    def __iter__(self) -> Iterator[_Part | RowSample]:
        return self.parts


class _SeededRows(Dataset[_LoadedPart]):
    """A dataset of the parts of global batches; in a loading process, that process's copy."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._collate_fn = dataset, collate_fn

    def load(self, part: _Part) -> _LoadedPart:
        """Loads and collates the rows of each replica, and leaves all generators as they were."""
        with _seeding((self.dataset, self._collate_fn)) as seed_all:
            batches = [self._load(rows, seed_all) for rows in part.replicas]
        return _LoadedPart(batches, [rows.empty for rows in part.replicas], part.digest)

    def read(self, sample: RowSample) -> list[Readings]:
        """Reads rows without collating them, and leaves all generators as they were."""
        at_once = getattr(self.dataset, "__getitems__", None)
        # These rows are read only to be compared. All generators of the data are put back, those of its transforms too
        # (test_the_generators_of_the_data_stay_where_they_are).
        with _restored(self.dataset), _seeding((self.dataset, self._collate_fn)) as seed_all:
            rows: list[Readings] = []
            for key, seed in zip(sample.keys, sample.seeds, strict=True):
                rows.append([])
                for reading in range(sample.readings):
                    seed_all(derived_seed(seed, sample.readings, reading))
                    rows[-1].append(describe_row(at_once([key])[0] if at_once else self.dataset[key]))
        return rows

    def __getitems__(self, item: _Part | RowSample) -> Any:
        """What a DataLoader calls with an item of its batch sampler."""
        return self.read(item) if isinstance(item, RowSample) else self.load(item)

    def _load(self, rows: _ReplicaRows, seed_all: Callable[[int], None]) -> Any:
        seed_all(rows.seed)
        at_once = getattr(self.dataset, "__getitems__", None)
        return self._collate_fn(at_once(rows.indices) if at_once else [self.dataset[index] for index in rows.indices])


def _unchanged(part: Any) -> Any:
    """The collate_fn of the DataLoader with processes: the replicas' rows were collated as they were loaded."""
    return part


def _begin_process(user_init: Callable[[int], None] | None, process: int) -> None:
    """The worker_init_fn of the DataLoader with processes: shows the user's one the dataset that was given."""
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # it is frozen
    if user_init is not None:
        user_init(process)


@contextmanager
def _restored(dataset: Any) -> Iterator[None]:
    """Restores, after the block, all generators that a dataset holds, those of its transforms included."""
    states = list(_states_within(dataset))
    try:
        yield
    finally:
        for put_back in states:
            put_back()


def _states_within(dataset: Any) -> Iterator[Callable[[], object]]:
    numpy = sys.modules.get("numpy")
    visited: set[int] = set()
    open_ = [dataset]
    while open_ and len(visited) < _MOST_OBJECTS:
        value = open_.pop()
        if id(value) in visited or isinstance(value, (type, ModuleType, torch.Tensor)):
            continue
        visited.add(id(value))
        if isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            yield partial(value.setstate, value.getstate())
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, (list, tuple)):
            open_ += value[:_MOST_ITEMS]
        else:
            open_ += (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()


class _Lent(NamedTuple):
    """A generator that loading may draw from: how it is put back, and how it is seeded."""

    put_back: Callable[[], object]
    seed: Callable[[int], object]


@contextmanager
def _seeding(holders: Sequence[Any]) -> Iterator[Callable[[int], None]]:
    """Yields a function that seeds all generators that loading may draw from, and restores them after the block.

    These are torch's default generator, Python's and NumPy's, and the attributes of ``holders`` that are generators.
    Python's and NumPy's are the whole process's: in a thread that reads ahead they are left to the loop, and torch's
    default is the thread's own. No lock is held, since a process may be forked from another thread at any time.
    """
    thread_generator = own_generator.get()
    of_thread = None if thread_generator is None else thread_generator()
    default = of_thread or torch.default_generator
    lent = [_Lent(partial(default.set_state, default.get_state()), default.manual_seed), *_lent_by(holders)]
    if of_thread is None:
        lent.append(_Lent(partial(random.setstate, random.getstate()), random.seed))
        if (state := numpy_state()).get("bit_generator") == "MT19937":
            numpys = sys.modules["numpy"].random
            lent.append(_Lent(partial(numpys.set_state, state), lambda seed: numpys.seed(seed % 2**32)))

    def seed_all(seed: int) -> None:
        lent[0].seed(seed)
        for place, generator in enumerate(lent[1:]):
            generator.seed(derived_seed(seed, place))

    try:
        yield seed_all
    finally:
        for generator in lent:
            generator.put_back()


def _lent_by(holders: Sequence[Any]) -> Iterator[_Lent]:
    """The attributes that are generators of torch's, which keep to their own seeds, of Python's or of NumPy's."""
    numpy = sys.modules.get("numpy")
    for generator in generators_of(*holders):
        seed_own = partial(_seed_torchs, generator, generator.initial_seed())
        yield _Lent(partial(generator.set_state, generator.get_state()), seed_own)
    for value in (value for holder in holders for value in getattr(holder, "__dict__", {}).values()):
        if type(value) is random.Random:
            yield _Lent(partial(value.setstate, value.getstate()), value.seed)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            yield _Lent(partial(setattr, bits, "state", bits.state), partial(_seed_numpys, bits))


def _seed_torchs(generator: torch.Generator, number: int, seed: int) -> None:
    generator.manual_seed(derived_seed(seed, number))


def _seed_numpys(bits: Any, seed: int) -> None:
    bits.state = type(bits)(seed % 2**64).state
