"""Data whose files or shards are divided among the workers, so that each reads its own only.

shard="file": dataset.shard(num_shards=workers, index=worker), as Hugging Face data sets have it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lockstep.collectives.communicator import Workers
from lockstep.errors import DataError


@runtime_checkable
class Shardable(Protocol):
    """Data that gives one of several parts of itself, such as a Hugging Face data set."""

    def shard(self, num_shards: int, index: int) -> Any:
        """Part ``index``, from 0, of ``num_shards``."""
        ...


@runtime_checkable
class _Counted(Protocol):
    @property
    def num_shards(self) -> int: ...


def own_files(dataset: Iterable[Any], workers: Workers) -> Iterable[Any]:
    """This worker's part of the data; batches are then made of it alone.

    Args:
        dataset: has ``shard(num_shards=, index=)``; or a DataLoader over data that has it, in file order or shuffled
            by the DataLoader itself.
        workers: all workers.

    Raises:
        DataError: data that cannot be divided so.
    """
    if isinstance(dataset, DataLoader):
        return _own_loader(dataset, workers)
    part: Iterable[Any] = _own_part(dataset, workers)
    return part


def _own_part(dataset: Any, workers: Workers) -> Any:
    if not isinstance(dataset, Shardable):
        _refuse(f"{type(dataset).__name__} has no shard(num_shards=, index=)")
    if isinstance(dataset, _Counted) and dataset.num_shards < workers.size:
        raise DataError(
            f'shard="file": the data has {dataset.num_shards} shards for {workers.size} workers; save it in at least '
            'as many, or use shard="batch"'
        )
    return dataset if workers.size == 1 else dataset.shard(num_shards=workers.size, index=workers.index)


def _own_loader(loader: DataLoader[Any], workers: Workers) -> DataLoader[Any]:
    if type(loader) is not DataLoader:
        _refuse(f"{type(loader).__name__} is a DataLoader of another kind")
    part = _own_part(loader.dataset, workers)
    if workers.size == 1:
        return loader
    order: dict[str, Any] = (
        {} if isinstance(loader.dataset, IterableDataset) else {"sampler": _own_sampler(loader, part)}
    )
    return DataLoader(
        part,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
        **order,
    )


def _own_sampler(loader: DataLoader[Any], part: Any) -> SequentialSampler | RandomSampler:
    """The same order over the part; a sampler of the user's own knows the whole data only."""
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
        f'shard="file" cannot divide this data between workers: {reason}; give a Hugging Face data set, or let '
        "strategy.distribute_datasets_from_function(fn) read the files of fn's context.input_pipeline_id, or use "
        'shard="batch"'
    )
