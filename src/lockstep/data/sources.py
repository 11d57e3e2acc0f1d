"""What is known of a source: its length, whether it may be read ahead, and whether it can be entered at a later batch.

A DataLoader whose dataset is of a known kind that draws no random numbers, and that collates as torch does, can skip
batches at its sampler. Every other source is read: a dataset, a sampler or a ``collate_fn`` may draw at any time, from
any generator.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, Protocol, TypeGuard, runtime_checkable

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.collectives.communicator import Communicator
from lockstep.data.prefetch import check_skip, skip_first
from lockstep.errors import DataError

# These draw from torch's default generator at their first index, if at all, and not between batches.
_DRAW_AT_FIRST = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)

# The arguments of a DataLoader that say how rows are loaded, not which.
_LOADING = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)

_KNOWN_PACKAGES = ("torch", "builtins", "transformers", "accelerate", "lockstep")
"""Packages whose samplers, and iterables of batches, look at nothing that a training step changes."""


def batches_in(dataset: object) -> int | None:
    """Returns the length of a source, or None if it does not say."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has __len__, which raises
        return None


def loads_by_index(dataset: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader that makes batches of a map-style dataset in torch's own way."""
    return (
        isinstance(dataset, DataLoader)
        and not isinstance(dataset.dataset, IterableDataset)
        and dataset.batch_sampler is not None
        and type(dataset).__iter__ is DataLoader.__iter__
        and type(dataset)._get_iterator is DataLoader._get_iterator
    )


def may_read_ahead(dataset: Any) -> bool:
    """Whether a source gives the same batches whenever it is asked.

    A generator, an iterable or a sampler of the user's own may look at what the loop has done so far, as a replay
    buffer does. Loading processes have their own copies, which do not see it anyway.
    """
    if not isinstance(dataset, DataLoader):
        return _draws_nothing(dataset) or _is_hugging_face(dataset) or _package(dataset) == "lockstep"
    samplers = (dataset.sampler, dataset.batch_sampler)
    known = all(_package(each) in _KNOWN_PACKAGES for each in samplers)
    if not known or type(dataset).__iter__ is not DataLoader.__iter__:
        return False
    return (
        dataset.num_workers > 0 or not isinstance(dataset.dataset, IterableDataset) or _is_hugging_face(dataset.dataset)
    )


def persists(dataset: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader whose processes live on from one iteration to the next."""
    return isinstance(dataset, DataLoader) and dataset.persistent_workers and dataset.num_workers > 0


def started(dataset: Any) -> bool:
    """Whether persistent processes run: then an iteration draws no seed for them."""
    return persists(dataset) and dataset._iterator is not None


def start(dataset: Any) -> None:
    """Starts the persistent processes of a DataLoader that continues where another one stopped."""
    if persists(dataset) and not started(dataset):
        iter(dataset)


def iterate_from(dataset: Iterable[Any], skip: int) -> Iterator[Any]:
    """Begins a new iteration, at once. Its first ``skip`` items are left out or ``SKIPPED``."""
    check_skip(skip)
    if skip and loads_by_index(dataset) and draws_at_first(dataset):
        sampler: Any = dataset.batch_sampler
        seeds = torch.Generator() if started(dataset) else dataset.generator
        return iter(rebuilt_loader(dataset, _SkippingSampler(sampler, skip), seeds))
    return skip_first(skip, iter(dataset))


def draws_at_first(loader: DataLoader[Any]) -> bool:
    """Whether everything that is drawn, apart from the sampler's own generator, is drawn before the first batch."""
    sampler = loader.batch_sampler
    return (
        type(sampler) is BatchSampler
        and type(sampler.sampler) in _DRAW_AT_FIRST
        and loader.collate_fn is default_collate
        and _draws_nothing(loader.dataset)
    )


def rebuilt_loader(
    loader: DataLoader[Any], batch_sampler: Iterable[Any], generator: torch.Generator | None
) -> DataLoader[Any]:
    """Returns ``loader`` with another batch sampler and another generator for the seeds of its processes, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own loader has given its warnings already
        return DataLoader(loader.dataset, batch_sampler=batch_sampler, generator=generator, **_loading_of(loader))


def _loading_of(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _LOADING}


@dataclass
class _SkippingSampler:
    """The batches of a batch sampler without the first ones."""

    batches: Iterable[Any]
    skip: int

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.skip, None)


def _draws_nothing(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(part) for part in dataset.datasets)
    if type(dataset) in (TensorDataset, range, list, tuple):
        return True
    datasets = sys.modules.get("datasets")
    return datasets is not None and type(dataset) is datasets.Dataset and dataset.format["type"] != "custom"


def _package(thing: Any) -> str:
    return type(thing).__module__.split(".")[0]


def _is_hugging_face(dataset: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, (datasets.Dataset, datasets.IterableDataset))


@runtime_checkable
class _Shardable(Protocol):
    def shard(self, num_shards: int, index: int) -> Any: ...


def shard_files(dataset: Iterable[Any], workers: Communicator) -> Iterable[Any]:
    """Returns this worker's files of the data, for ``shard="file"``. Batches are then made of them alone.

    ``dataset`` has ``shard(num_shards=, index=)``, as Hugging Face datasets have, or is a DataLoader over such data, in
    file order or shuffled by the DataLoader itself.

    Raises DataError if the data cannot be divided so.
    """
    if not isinstance(dataset, DataLoader):
        part: Iterable[Any] = _own_part(dataset, workers)
        return part
    if type(dataset) is not DataLoader:
        _refuse(f"{type(dataset).__name__} is a subclass of DataLoader")
    loader: DataLoader[Any] = dataset
    rows = _own_part(loader.dataset, workers)
    if workers.size == 1:
        return loader
    sampler = None if isinstance(loader.dataset, IterableDataset) else _own_sampler(loader, rows)
    which = {name: getattr(loader, name) for name in ("batch_size", "drop_last", "generator", "in_order")}
    return DataLoader(rows, sampler=sampler, **which, **_loading_of(loader))


def _own_part(dataset: Any, workers: Communicator) -> Any:
    if not isinstance(dataset, _Shardable):
        _refuse(f"{type(dataset).__name__} has no shard(num_shards=, index=)")
    if (shards := getattr(dataset, "num_shards", workers.size)) < workers.size:
        raise DataError(
            f'shard="file": the data has {shards} shards for {workers.size} workers; save it in at least '
            'as many, or use shard="batch"'
        )
    return dataset if workers.size == 1 else dataset.shard(num_shards=workers.size, index=workers.index)


def _own_sampler(loader: DataLoader[Any], part: Any) -> SequentialSampler | RandomSampler:
    """The same order over the part. A sampler of the user's own knows the whole data only."""
    sampler = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        _refuse(f"its DataLoader has a {type(loader.batch_sampler).__name__}, which is about the whole data")
    if type(sampler) is SequentialSampler:
        return SequentialSampler(part)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return RandomSampler(part, generator=sampler.generator)
    return _refuse(f"its DataLoader has a {type(sampler).__name__}, which is about the whole data")


def _refuse(reason: str) -> NoReturn:
    raise DataError(
        f'shard="file" cannot divide this data between workers: {reason}; give a Hugging Face dataset, shard="batch",'
        " or let strategy.distribute_datasets_from_function(fn) read the files of fn's context.input_pipeline_id"
    )
