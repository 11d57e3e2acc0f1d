"""Distributed datasets: any iterable of batches, as batches with one value per replica, on that replica's device.

``DistributedDataset`` divides global batches. ``PerReplicaDataset`` takes batches that a function made per replica.
Both can be iterated many times, and are read ahead where that changes nothing. An iteration is a chain:

    source -> reader (shards of each batch) -> transfer to the devices -> read ahead -> worker_sync -> consumer
    [ reading thread                                                        ] [ consumer's thread           ]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.checks import check_choice, check_kind, check_number
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator
from lockstep.config import LogicalDevice
from lockstep.data.batch_lists import ListReader, Lists
from lockstep.data.divide import Division
from lockstep.data.readers import BatchReader, PerReplicaReader, Reader
from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.data.row_loading import ReplicaRowsReader
from lockstep.data.sharding import LocalRows, local_rows, shard_sizes
from lockstep.data.sources import loads_by_index
from lockstep.data.streaming_sources import part_of_worker
from lockstep.data.worker_sync import OwnDataSync, SameDataSync, WorkerSync
from lockstep.errors import ConfigError, DataError

Shard = Literal["batch", "file", "off"]


@dataclass(frozen=True, kw_only=True)
class InputContext:
    """A worker's place among the input pipelines, with TensorFlow's names.

    Args:
        num_input_pipelines: the number of pipelines, one per worker.
        input_pipeline_id: the index of this worker's pipeline, from 0.
        num_replicas_in_sync: the number of replicas of all workers.

    Example:
        >>> import lockstep as ls
        >>> ls.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, whole=True, optional=False)
        if not (0 <= self.input_pipeline_id < self.num_input_pipelines and self.num_replicas_in_sync > 0):
            raise ConfigError(f"{self} is impossible; give at least 1 replica, and an id below num_input_pipelines")

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of rows of one replica's batch.

        Raises:
            ConfigError: (a ValueError) the global batch does not divide evenly among the replicas.
        """
        replicas = self.num_replicas_in_sync
        check_number("global_batch_size", global_batch_size, whole=True, optional=False)
        if global_batch_size < 1 or global_batch_size % replicas:
            smaller = global_batch_size // replicas * replicas
            choice = f"{smaller} or {smaller + replicas}" if smaller > 0 else str(replicas)
            raise ConfigError(
                f"global_batch_size={global_batch_size} does not divide among {replicas} replicas; choose {choice}"
            )
        return global_batch_size // replicas


class DistributedDataset(DistributedIterable):
    """Global batches, each divided among the replicas: shard sizes differ by at most one, the larger ones first.

    Args:
        dataset: any iterable of global batches: a DataLoader, a list, a Hugging Face dataset in torch format whose
            items are batches. Each iteration of this object iterates over it anew.
        devices: logical devices of the local replicas, in replica order.
        workers: all workers; None is this process alone. Every worker makes this object and iterates over it alike.
        shard: what each worker takes of the data. "batch": its replicas' shards of every global batch; all workers
            have the same data. "file": each worker reads some of the shards of a datasets.IterableDataset, which may be
            in a DataLoader, in batches of its own. "off": each worker reads its own dataset. With these two a batch is
            divided among the worker's own replicas, and a worker whose data has ended gives empty batches until the
            last worker's data has ended.
        prefetch: the number of batches to read ahead in a thread; 0 reads a batch when it is asked for. None is 2 for a
            DataLoader with worker processes and, where replicas are on GPUs, for data in memory (a list, a
            TensorDataset, a Hugging Face dataset). It is 0 where replicas are on a CPU, whose cores compute, and for
            what may draw random numbers or look at the state of the training: generators, iterables, datasets and
            samplers of your own. Data that is read ahead must not draw from torch's default generator, and may
            leave others further than a loop that is left early.
        lists: what a list or tuple in a batch is: one item a row ("rows", also of a batch that is a list itself), or
            structure whose tensors all have all rows ("columns"). "auto" tells them apart by their lengths and refuses
            what could be both; a DataLoader with torch's collation gives columns.
        items: batches are (x, y) or (x, y, sample_weight), as Model takes them, be they tuples or lists.
        divide: how batches are divided whose tensors have other than one row an example; see ``divide``.

    Raises:
        DataError: ``dataset`` is not an iterable of batches, or cannot be divided as ``shard`` says.
        ConfigError: ``shard`` is unknown, or ``prefetch`` is not a number of batches.

    Example:
        >>> import lockstep as ls, torch
        >>> strategy = ls.MirroredStrategy(["cpu:0"])
        >>> [batch.values for batch in strategy.distribute_dataset([torch.arange(2)])]
        [(tensor([0, 1]),)]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        devices: Sequence[LogicalDevice],
        *,
        workers: Communicator | None = None,
        shard: Shard = "batch",
        prefetch: int | None = None,
        lists: Lists = "auto",
        items: bool = False,
        divide: Division | None = None,
    ) -> None:
        check_choice("shard", shard, get_args(Shard))
        check_kind("divide", divide, Division, "what a function of ls.divide returns, such as ls.divide.in_groups(2)")
        workers = workers or SingleWorkerCommunicator(len(devices))
        source = _checked(dataset)
        if shard == "file":
            source = part_of_worker(source, workers)
        list_reader = ListReader.of(source, lists, items=items, copies=workers.any_layout, division=divide)
        reader: Reader
        sync: WorkerSync
        if shard == "batch":
            reader = _global_reader(source, workers, list_reader)
            sync = WorkerSync() if workers.is_single else SameDataSync(workers, reader)
        else:
            replicas = workers.replicas[workers.index]
            reader = BatchReader(
                source, list_reader, lambda rows: LocalRows(start=0, sizes=shard_sizes(rows, replicas))
            )
            sync = _own_data_sync(reader, workers)
        super().__init__(reader, sync, devices, prefetch=prefetch)


class PerReplicaDataset(DistributedIterable):
    """Batches that are per-replica already, taken in order: replica 0 gets the first, replica 1 the second, and so on.

    Replicas for which none is left get an empty batch until the last worker's source has ended.

    Args:
        fn: called once, with this worker's ``InputContext``; returns an iterable of per-replica batches for it.
        devices: logical devices of the local replicas, in replica order.
        workers, prefetch, lists: as in ``DistributedDataset``; ``prefetch`` counts rounds.
    """

    def __init__(
        self,
        fn: Callable[[InputContext], Iterable[Any]],
        devices: Sequence[LogicalDevice],
        *,
        workers: Communicator | None = None,
        prefetch: int | None = None,
        lists: Lists = "auto",
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"got a {type(fn).__name__}, expected a function of an InputContext that returns batches")
        workers = workers or SingleWorkerCommunicator(len(devices))
        context = InputContext(
            num_input_pipelines=workers.size, input_pipeline_id=workers.index, num_replicas_in_sync=workers.num_replicas
        )
        source = _checked(fn(context))
        list_reader = ListReader.of(source, lists, copies=workers.any_layout)
        reader = PerReplicaReader(source, len(devices), list_reader)
        super().__init__(reader, _own_data_sync(reader, workers), devices, prefetch=prefetch)


def _global_reader(dataset: Iterable[Any], workers: Communicator, list_reader: ListReader) -> Reader:
    several = not workers.is_single
    sampler = dataset.sampler if isinstance(dataset, DataLoader) else None
    if isinstance(sampler, DistributedSampler) and (several or sampler.num_replicas > 1):
        raise DataError(
            "received a DataLoader with a DistributedSampler, which takes one worker's part of the data already; give "
            'one without it, which Lockstep divides, or distribute it with shard="off"'
        )
    if loads_by_index(dataset) and (several or workers.any_layout):
        return ReplicaRowsReader(dataset, workers, list_reader)
    rows = partial(local_rows, workers=workers)
    return BatchReader(dataset, list_reader, rows, with_digest=several)


def _own_data_sync(reader: Reader, workers: Communicator) -> WorkerSync:
    return WorkerSync() if workers.is_single else OwnDataSync(workers, reader.length)


def _checked(dataset: Any) -> Any:
    if isinstance(dataset, DistributedIterable):
        raise DataError("received a dataset that is distributed already; distribute the original once")
    numpy = sys.modules.get("numpy")
    is_one = isinstance(dataset, (torch.Tensor, Mapping, str, bytes)) or (numpy and isinstance(dataset, numpy.ndarray))
    # What has __getitem__ alone is iterable too, by Python's old protocol. The items of torch's own datasets are rows,
    # which a DataLoader makes batches of. Items of other datasets, such as Hugging Face's, may be batches.
    gives_rows = isinstance(dataset, Dataset) and not isinstance(dataset, Iterable)
    if is_one or gives_rows or not (isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")):
        raise DataError(
            f"received a {type(dataset).__name__}, expected an iterable of global batches; give a DataLoader, such as "
            "DataLoader(dataset, batch_size=64), or a list of batches, such as [(x, y)]"
        )
    return dataset
