"""Distributed datasets: any iterable of batches, as batches with one value per replica, on that replica's device.

``DistributedDataset`` divides global batches. ``PerReplicaDataset`` takes batches that a function made per replica.
Both can be iterated many times, and are read ahead where that changes nothing. An iteration is a chain:

    source -> reader (shards of each batch) -> transfer to the devices -> read ahead -> worker_sync -> consumer
    [ reading thread                                                        ] [ consumer's thread           ]
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.checks import check_choice, check_number
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator
from lockstep.config import LogicalDevice
from lockstep.data.attribute_state import AttributeState, Look, SourceAttributes
from lockstep.data.list_reader import ListReader, Lists
from lockstep.data.prefetch import DEFAULT_DEPTH, ClosableIterator, ReadAhead, checked_depth
from lockstep.data.random_state import (
    DEFAULT,
    STARTED,
    RandomState,
    default_state,
    random_state,
    set_default_state,
    set_random_state,
    without_default,
)
from lockstep.data.readers import BatchReader, PerReplicaReader, Reader
from lockstep.data.replica_rows import ReplicaRowsReader
from lockstep.data.sharding import LocalRows, local_rows, shard_sizes
from lockstep.data.sources import loads_by_index, may_read_ahead
from lockstep.data.streams import StatefulSource, part_of_worker, why_without_state
from lockstep.data.transfer import Transfer
from lockstep.data.worker_sync import OwnDataSync, SameDataSync, WorkerSync
from lockstep.errors import CheckpointError, ConfigError, DataError

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


@dataclass
class Position:
    """Where an iteration stands: after the batch that it handed out last.

    Attributes:
        random: the states of the generators when the iteration began.
        passed: how many global batches, or rounds, have been handed out or left out.
        part: this worker's index and the number of workers where each reads data of its own; None where all read the
            same.
        lists: what the lists in the batches so far held, as ``ListReader.modes``.
        source: the state of the source itself, None if it has none.
        ended: whether all batches have been handed out.
        attributes: of samplers and datasets, and what they were when the iteration began.
    """

    random: RandomState
    passed: int
    part: tuple[int, int] | None
    lists: Mapping[str, str]
    source: dict[str, Any] | None = None
    ended: bool = False
    attributes: tuple[SourceAttributes, Look] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position for ``DistributedIterable.resume``, of plain values and tensors."""
        now = {"passed": self.passed, "source": self.source, "part": self.part, "lists": dict(self.lists)}
        state: AttributeState = []
        if self.attributes is not None:
            attributes, begun = self.attributes
            state = attributes.state(begun, rows="begun" if self.source is None else "now")
        return {**now, "random": dict(self.random), "attributes": state}


class DataIteration:
    """One iteration over distributed data: an iterator over batches that keeps its ``position``."""

    def __init__(
        self, batches: ClosableIterator[Any], states: deque[dict[str, Any]] | None, position: Position
    ) -> None:
        self._batches, self._states, self.position = batches, states, position

    def __iter__(self) -> DataIteration:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.position.ended = True
            raise
        self.position.passed += 1
        if self._states:  # none is added for an empty batch, given after the end of this worker's own data
            self.position.source = self._states.popleft()
        return batch

    def close(self) -> None:
        """Ends the iteration, and the thread that reads ahead for it."""
        self._batches.close()


class DistributedIterable:
    """Batches on the replicas' devices, which can be iterated any number of times, also at once.

    ``prefetch`` is the number of batches to read ahead. 0 reads in the caller's thread. None chooses by the source.
    """

    def __init__(
        self, reader: Reader, sync: WorkerSync, devices: Sequence[LogicalDevice], *, prefetch: int | None
    ) -> None:
        self._reader = reader
        self._sync = sync
        self._devices = tuple(devices)
        if prefetch is None:
            prefetch = DEFAULT_DEPTH if may_read_ahead(reader.dataset) else 0
        self._prefetch = checked_depth(prefetch)
        self._stateful = StatefulSource.of(reader.dataset)
        self._attributes = SourceAttributes(reader.dataset, self._stateful and self._stateful.owner)
        self._position: Position | None = None  # of the loop begun last
        self._loaded: Mapping[str, Any] | None = None
        self._begun = False

    def __iter__(self) -> DataIteration:
        loaded, self._loaded = self._loaded, None
        iteration = self.iterate() if loaded is None else self.resume({**loaded, "attributes": ()})
        self._position = iteration.position
        return iteration

    def iterate(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> DataIteration:
        """Begins an iteration that continues where another one stopped.

        The first ``skip`` global batches, or rounds of per-replica batches, are read again, so that everything the
        source draws comes out as if they had been used. Of a map-style dataset that several workers read, or one read
        with ``replicas=``, only their indices are: what a row draws there depends on nothing before it.

        ``random`` is the result of ``random_state()`` when the first iteration began, or None to leave the generators
        as they are. torch's default generator belongs to the caller: it is put back once the iteration has begun.

        Raises DataError if the source holds other generators than ``random`` describes.
        """
        check_number("skip", skip, least=0, whole=True, optional=False)
        transfer, callers = Transfer(self._devices), default_state()
        if random is not None:
            if STARTED in random:
                self._reader.start()
                set_default_state(callers)
            set_random_state(self._reader.dataset, random)
        if self._stateful is not None:
            self._stateful.rewind()
        begun, look = self.random_state(), self._attributes.look()
        self._sync.begin()
        self._begun = True
        # Begun in the caller's thread: what this draws from torch's generator comes in program order.
        batches, states = self._noting(self._reader.begin(skip, transfer))
        self._sync.compare()
        if random is not None and DEFAULT in random:
            if not skip:  # a sampler draws its seed with the first batch
                batches = chain(list(islice(batches, 1)), batches)
            set_default_state(callers)
        handed_out = self._handed_out(batches, transfer, lambda: self._reader.left_out)
        return DataIteration(handed_out, states, self._at(begun, skip, look=look))

    def resume(self, position: Mapping[str, Any]) -> DataIteration:
        """Begins an iteration that continues at the position that ``Position.state_dict`` returned.

        A source that tells its state goes on at the very sample. Of others the batches before it are read again.

        Raises CheckpointError if the position is of another part of the data, or of other data.
        """
        part = None if position.get("part") is None else tuple(position["part"])
        if part != self._sync.part:
            raise CheckpointError(
                f"the saved position is that of {_described(part)}, but this is {_described(self._sync.part)}; resume "
                'on as many workers as it was saved on, with the same shard=, or read all data on each (shard="batch")'
            )
        self._reader.list_reader.modes.update(position.get("lists", {}))
        self.load_attributes(position)
        state = position.get("source")
        if state is None or self._stateful is None:
            if position["passed"] and self._reader.length is None:
                self._tell_of_reading_again(position["passed"])
            return self.iterate(skip=position["passed"], random=position["random"])
        transfer, callers = Transfer(self._devices), default_state()
        look = self._attributes.look()
        self._stateful.load(state)
        self._sync.begin()
        self._begun = True
        batches, states = self._noting(self._reader.begin(0, transfer))
        self._sync.compare()
        self._stateful.restore_generators(state)
        set_default_state(callers)
        handed_out = self._handed_out(batches, transfer, lambda: self._first_batch(transfer))
        return DataIteration(
            handed_out, states, self._at(dict(position["random"]), position["passed"], dict(state), look)
        )

    def _at(
        self, random: RandomState, passed: int, source: dict[str, Any] | None = None, look: Look | None = None
    ) -> Position:
        attributes = None if look is None else (self._attributes, look)
        return Position(random, passed, self._sync.part, self._reader.list_reader.modes, source, attributes=attributes)

    def _tell_of_reading_again(self, passed: int) -> None:
        source = self._reader.dataset
        why = why_without_state(source)
        if isinstance(source, Iterator) and self._begun:
            raise CheckpointError(
                f"a {type(source).__name__} can be read only once, and this one has been read already; make the data "
                "anew before it goes on at a saved position"
            )
        warnings.warn(
            f"the batches before the saved position ({passed}) are read again and left out, as {why}; "
            "see the how-to page on data for sources that go on at the very sample",
            stacklevel=4,
        )

    def _noting(self, batches: Iterator[Any]) -> tuple[Iterator[Any], deque[dict[str, Any]] | None]:
        if self._stateful is None:
            return batches, None
        states: deque[dict[str, Any]] = deque()
        return self._stateful.noting(batches, states), states

    def _handed_out(
        self, batches: Iterator[Any], transfer: Transfer, left_out: Callable[[], Any]
    ) -> ClosableIterator[Any]:
        return transfer.received(self._sync.wrap(ReadAhead(batches, self._prefetch), left_out))

    def _first_batch(self, transfer: Transfer) -> Any:
        """Reads the first batch of a source whose state is at its end. An empty batch is made like it."""
        assert self._stateful is not None
        callers = default_state()
        self._stateful.rewind()
        first = next(self._reader.begin(0, transfer), None)
        set_default_state(callers)
        return first

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the ``for`` loop begun last: after the batch that it got last.

        After the last batch of the data, and before any loop, it is the beginning of the next one. Give the data to a
        ``Checkpoint`` to save it, each worker's own.
        """
        if self._position is not None and not self._position.ended:
            return self._position.state_dict()
        if self._loaded is not None:
            return dict(self._loaded)
        return {**self._at(without_default(self.random_state()), 0).state_dict(), "attributes": self.attribute_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next ``for`` loop over this begin at a position that ``state_dict`` returned; see ``resume``."""
        self._position, self._loaded = None, dict(state)
        self.load_attributes(state)  # at once: set_epoch() may be called before the loop

    def attribute_state(self) -> AttributeState:
        """Returns what the attributes of samplers and datasets are now, of those that change between iterations."""
        return self._attributes.state()

    def load_attributes(self, position: Mapping[str, Any]) -> None:
        """Brings them to what they are in a position. Raises DataError if it is of other data."""
        self._attributes.load(position.get("attributes", ()))

    def random_state(self) -> RandomState:
        """Returns the current states of all generators that the source may draw from, for ``iterate``."""
        state = random_state(self._reader.dataset)
        return {**state, STARTED: torch.ones(())} if self._reader.started else state

    def load_random_state(self, state: Mapping[str, Tensor]) -> None:
        """Brings the generators to what ``random_state`` returned."""
        set_random_state(self._reader.dataset, state)

    def __len__(self) -> int:
        length = self._sync.length(self._reader.length)
        if length is None:
            kind = type(self._reader.dataset).__name__
            raise TypeError(f"the number of batches is unknown: {kind} has no len()")
        return length

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the next epoch to the source and its samplers, where these shuffle by epoch."""
        dataset = self._reader.dataset
        parts: list[Any] = [dataset]
        if isinstance(dataset, DataLoader):
            parts += [dataset.sampler, dataset.batch_sampler, dataset.dataset]
        for part in {id(part): part for part in parts}.values():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)


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
            DataLoader with worker processes and for data in memory (a list, a TensorDataset, a Hugging Face dataset),
            and 0 for what may draw random numbers or look at the state of the training: generators, iterables, datasets
            and samplers of your own. Data that is read ahead must not draw from torch's default generator, and may
            leave others further than a loop that is left early.
        lists: what a list or tuple in a batch is: one item a row ("rows", also of a batch that is a list itself), or
            structure whose tensors all have all rows ("columns"). "auto" tells them apart by their lengths and refuses
            what could be both; a DataLoader with torch's collation gives columns.
        items: batches are (x, y) or (x, y, sample_weight), as Model takes them, be they tuples or lists.

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
    ) -> None:
        check_choice("shard", shard, get_args(Shard))
        workers = workers or SingleWorkerCommunicator(len(devices))
        source = _checked(dataset)
        if shard == "file":
            source = part_of_worker(source, workers)
        list_reader = ListReader.of(source, lists, items=items, copies=workers.any_layout)
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


def _described(part: tuple[int, int] | None) -> str:
    return "data that all workers read" if part is None else f"the own data of worker {part[0]} of {part[1]}"


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
