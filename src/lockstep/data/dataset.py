"""DistributedIterable datasets: any iterable of batches, seen as structures with one value per replica, on its device.

``DistributedDataset`` divides global batches; ``PerReplicaDataset`` takes batches that a function made per replica.
Both can be iterated many times, and read ahead where that changes nothing. What the data is, and its order, stay the
source's business.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator
from lockstep.config import LogicalDevice
from lockstep.data.layout import BatchLayout, Lists
from lockstep.data.prefetch import DEPTH, ClosableIterator, checked_depth, read_ahead
from lockstep.data.readers import IndexShardedReader, LocalReader, PerReplicaReader, Reader, SlicingReader
from lockstep.data.resume import STARTED, RandomState, begin_again, random_state
from lockstep.data.source_random import default_state, set_default_state, watched_generators
from lockstep.data.sources import loads_by_index, read_ahead_unasked, shard_files
from lockstep.data.transfer import Transfer
from lockstep.data.worker_sync import NoSync, OwnDataSync, SameDataSync, WorkerSync
from lockstep.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class InputContext:
    """A worker's place among the input pipelines.

    Args:
        num_input_pipelines: how many pipelines there are, one per worker.
        input_pipeline_id: this worker's, from 0.
        num_replicas_in_sync: the replicas of all workers.

    Example:
        >>> import lockstep as ls
        >>> ls.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_input_pipelines < 1 or self.num_replicas_in_sync < 1:
            raise ConfigError(
                f"num_input_pipelines={self.num_input_pipelines} and num_replicas_in_sync={self.num_replicas_in_sync}: "
                "give at least 1 of each"
            )
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ConfigError(
                f"input_pipeline_id={self.input_pipeline_id} is none of {self.num_input_pipelines} pipelines; "
                f"choose 0 to {self.num_input_pipelines - 1}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of one replica's batch.

        Raises:
            ConfigError: a ValueError: the global batch does not divide evenly among the replicas.
        """
        replicas = self.num_replicas_in_sync
        if global_batch_size < 1 or global_batch_size % replicas:
            smaller = global_batch_size // replicas * replicas
            choice = f"{smaller} or {smaller + replicas}" if smaller > 0 else str(replicas)
            raise ConfigError(
                f"global_batch_size={global_batch_size} does not divide among {replicas} replicas; choose {choice}"
            )
        return global_batch_size // replicas


def _depth(reader: Reader) -> int:
    return DEPTH if read_ahead_unasked(reader.dataset) else 0


class Passes:
    """Begins iterations; any number of them, also at once.

    Args:
        reader: reads this worker's part of the source.
        meeting: what is said between the workers meanwhile.
        devices: the local replicas' devices, in replica order.
        prefetch: how many batches to read ahead; 0 reads in the caller's thread. None is 2 for a source that may be,
            as long as it does not draw random numbers.

    Raises:
        ConfigError: ``prefetch`` is no number of batches.
    """

    def __init__(
        self, reader: Reader, meeting: WorkerSync, devices: Sequence[LogicalDevice], *, prefetch: int | None
    ) -> None:
        self._reader = reader
        self._meeting = meeting
        self._devices = tuple(devices)
        self._told = prefetch is not None
        self._prefetch = checked_depth(prefetch) if prefetch is not None else _depth(reader)

    @property
    def dataset(self) -> Iterable[Any]:
        """The source, or this worker's part of it."""
        return self._reader.dataset

    def begin(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> ClosableIterator[Any]:
        """An iteration without its first ``skip`` batches; see ``DistributedDataset.iterate``."""
        transfer = Transfer(self._devices)
        if random is not None and STARTED in random:
            callers = default_state()
            self._reader.start()
            set_default_state(callers)
        begun = begin_again(self.dataset, random)
        self._meeting.begin(self._reader)
        # Begun here and now, in the caller's thread: what it draws from torch's generator comes in program order.
        source = self._reader.begin(skip, transfer)
        watched = watched_generators(self.dataset, default=not self._told)
        ahead = read_ahead(source, self._prefetch, begun=begun, others=watched, skip=skip)
        return transfer.received(self._meeting.hand_out(ahead, transfer))

    def random_state(self) -> RandomState:
        """The states of all generators that the source may draw from, now."""
        state = random_state(self.dataset)
        return {**state, STARTED: torch.ones(())} if self._reader.started else state

    def length(self) -> int:
        """The number of batches of an iteration.

        Raises:
            TypeError: it is unknown.
        """
        known = self._meeting.length(self._reader)
        if known is None:
            raise TypeError(f"the number of batches is unknown: {type(self.dataset).__name__} has no len()")
        return known


class DistributedIterable:
    """Batches on the replicas, any number of times. Abstract: each kind says of which source, and how it is read.

    Args:
        passes: begins the iterations.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def __iter__(self) -> ClosableIterator[Any]:
        return self._passes.begin()

    def iterate(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> ClosableIterator[Any]:
        """An iteration that goes on where another one stopped.

        The batches before that place are read once more, unless the data can go there without, so that all that the
        data draws comes out as if they had been taken.

        Args:
            skip: how many global batches, or rounds of per-replica ones, to pass over.
            random: what ``random_state()`` gave when that iteration began, or None to begin with the generators as
                they are. torch's default generator is put back when the iteration has begun: it is the caller's.

        Raises:
            DataError: the data holds other generators than ``random`` is about.
        """
        return self._passes.begin(skip=skip, random=random)

    def random_state(self) -> RandomState:
        """The states of all generators that the data may draw from, now; for ``iterate``."""
        return self._passes.random_state()

    def __len__(self) -> int:
        return self._passes.length()

    def set_epoch(self, epoch: int) -> None:
        """Tells the data's sampler, where it shuffles by epoch, which one comes next."""
        dataset = self._passes.dataset
        parts: list[Any] = [dataset]
        if isinstance(dataset, DataLoader):
            parts += [dataset.sampler, dataset.batch_sampler, dataset.dataset]
        for part in {id(part): part for part in parts}.values():
            if isinstance(part, _ShufflesByEpoch):
                part.set_epoch(epoch)


@runtime_checkable
class _ShufflesByEpoch(Protocol):
    def set_epoch(self, epoch: int, /) -> None: ...


Shard = Literal["batch", "file", "off"]


class DistributedDataset(DistributedIterable):
    """Global batches, each divided among the replicas: shard sizes differ by at most one, the larger ones first.

    Args:
        dataset: any iterable of global batches: a DataLoader, a list, a Hugging Face dataset in torch format whose
            items are batches. Iterated anew for each iteration of this object.
        devices: the local replicas' devices, in replica order.
        workers: all workers; None is this process alone. Every worker makes this object and iterates over it alike.
        shard: what each worker takes of the data. "batch": its replicas' shards of every global batch, the same data
            being on all workers. "file": the data is divided by ``dataset.shard(num_shards=, index=)`` first. "off":
            all that its own dataset gives. With "file" and "off" a batch is divided among the worker's own replicas,
            and workers whose data has ended give empty batches until the last one has ended.
        prefetch: how many batches to read ahead in a thread; 0 reads each one when it is asked for, in the caller's
            thread. None is 2 for a DataLoader, a list and a Hugging Face dataset, as long as they draw no random
            numbers, and 0 for what may look at the training's state, such as a replay buffer: a generator, an iterable
            or a sampler of your own, and a DataLoader without processes over an ``IterableDataset`` of your own. A
            map-style dataset that looks at it needs ``prefetch=0``, since it would see a state up to two steps old.
        lists: what a list or tuple in a batch is: one item a row ("rows"), or structure ("columns"), whose tensors all
            have all rows. "auto" tells them apart by their lengths and refuses what could be both: a DataLoader that
            collates as torch does gives columns; a list as long as the batch, whose tensors are not, has rows. "rows"
            is for what stands in a tuple or dict and is as long as the batch, and for a batch that is a list itself.
        items: batches are (x, y) or (x, y, sample_weight), as Model's are, be they tuples or lists.

    Raises:
        DataError: what is no iterable of batches, or cannot be divided so.
        ConfigError: ``shard`` is unknown, or ``prefetch`` is no number of batches.

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
    ) -> None:
        if shard not in get_args(Shard):
            raise ConfigError(f'shard={shard!r} is unknown; choose "batch", "file" or "off"')
        workers = workers or SingleWorkerCommunicator(len(devices))
        source = _checked(dataset)
        layout = BatchLayout.of(source, lists, items=items)
        reader = (
            _shared_reader(source, workers, layout) if shard == "batch" else _own_reader(source, workers, shard, layout)
        )
        super().__init__(Passes(reader, _meeting(reader, workers), devices, prefetch=prefetch))


class PerReplicaDataset(DistributedIterable):
    """Batches that are per-replica already, taken in order: replica 0 gets the first, replica 1 the second, and so on.

    Where the source ends in the middle of a round the remaining replicas get an empty batch, and so do all of a worker
    whose source has ended while another's goes on.

    Args:
        fn: called once, with this worker's ``InputContext``; returns an iterable of per-replica batches for it.
        devices: the local replicas' devices, in replica order.
        workers: all workers; None is this process alone. Every worker makes this object and iterates over it alike.
        prefetch: how many rounds to read ahead; None and 0 as in ``DistributedDataset``.
        lists: as there.
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
        workers = workers or SingleWorkerCommunicator(len(devices))
        context = InputContext(
            num_input_pipelines=workers.size,
            input_pipeline_id=workers.index,
            num_replicas_in_sync=workers.num_replicas,
        )
        source = _checked(fn(context))
        reader = PerReplicaReader(source, len(devices), BatchLayout.of(source, lists))
        super().__init__(Passes(reader, _meeting(reader, workers), devices, prefetch=prefetch))


def _shared_reader(dataset: Iterable[Any], workers: Communicator, layout: BatchLayout) -> Reader:
    if workers.is_single:
        return LocalReader(dataset, workers.num_replicas, layout)
    if isinstance(dataset, DataLoader) and isinstance(dataset.sampler, DistributedSampler):
        raise DataError(
            "received a DataLoader whose DistributedSampler takes one worker's part of the data already; give one "
            'without it, which Lockstep divides, or distribute it with shard="off"'
        )
    return (
        IndexShardedReader(dataset, workers, layout)
        if loads_by_index(dataset)
        else SlicingReader(dataset, workers, layout)
    )


def _own_reader(dataset: Iterable[Any], workers: Communicator, shard: Shard, layout: BatchLayout) -> Reader:
    own = shard_files(dataset, workers) if shard == "file" else dataset
    return LocalReader(own, workers.replicas[workers.index], layout)


def _meeting(reader: Reader, workers: Communicator) -> WorkerSync:
    if workers.is_single:
        return NoSync()
    return (
        SameDataSync(workers)
        if isinstance(reader, (SlicingReader, IndexShardedReader))
        else OwnDataSync(workers, reader)
    )


@runtime_checkable
class _Indexed(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


def _checked(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, DistributedIterable):
        raise DataError("received a dataset that is distributed already; distribute the original once")
    numpy = sys.modules.get("numpy")
    if isinstance(dataset, (torch.Tensor, Mapping, str, bytes)) or (numpy and isinstance(dataset, numpy.ndarray)):
        raise DataError(
            f"received a {type(dataset).__name__}, expected an iterable of global batches; "
            "give a DataLoader, or a list of batches, such as [(x, y)]"
        )
    # Its items are rows: batches are what a DataLoader makes of them. Data sets that are no torch.utils.data.Dataset,
    # as Hugging Face's, may have batches as items.
    if isinstance(dataset, Dataset) and not isinstance(dataset, Iterable):
        kind = type(dataset).__name__
        raise DataError(
            f"received a {kind}, whose items are rows, expected an iterable of global batches; give a DataLoader of "
            f"it, such as DataLoader(dataset, batch_size=64), or batch_size=None where the items of {kind} are batches"
        )
    if not isinstance(dataset, (_Indexed, Iterable)):
        raise DataError(
            f"received a {type(dataset).__name__}, which cannot be iterated; give an iterable of global batches such "
            "as a DataLoader"
        )
    return dataset  # type: ignore[return-value]  # what has __getitem__ alone is iterable too, by Python's old protocol
