"""Iterations over distributed data, which keep their position and resume at a saved one, at the very next batch.

    position = random states as it began + batches that were handed out + state of the source, if it tells one

A source that tells its state continues there (``streaming_sources``). Of any other the batches before the position are
read again, and left out. ``DistributedIterable`` is the base of the data sets in ``dataset``.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.checks import check_number
from lockstep.config import LogicalDevice
from lockstep.data.attribute_state import AttributeState, Look, SourceAttributes
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
from lockstep.data.readers import Reader
from lockstep.data.sources import has_processes, may_read_ahead
from lockstep.data.streaming_sources import StatefulSource, why_without_state
from lockstep.data.transfer import Transfer
from lockstep.data.worker_sync import WorkerSync
from lockstep.errors import CheckpointError


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
            # Python that reads ahead for replicas on a CPU takes the interpreter, and a core, from their steps. Of an
            # MLP of width 64 an epoch without it took 0.93 of the time (a list), 0.83 (a DataLoader), 0.78 (datasets).
            helps = has_processes(reader.dataset) or any(device.kind == "GPU" for device in devices)
            prefetch = DEFAULT_DEPTH if helps and may_read_ahead(reader.dataset) else 0
        self._prefetch = checked_depth(prefetch)
        self._stateful = StatefulSource.of(reader.dataset)
        self._attributes = SourceAttributes(reader.dataset, self._stateful and self._stateful.owner)
        self._position: Position | None = None  # of the loop begun last
        self._loaded: Mapping[str, Any] | None = None
        self._begun = False

    @property
    def is_divided_by_example(self) -> bool:
        """Whether ``divide=`` says how batches are divided, so that dim 0 of a tensor is not one row an example."""
        return self._reader.list_reader.division is not None

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


def _described(part: tuple[int, int] | None) -> str:
    return "data that all workers read" if part is None else f"the own data of worker {part[0]} of {part[1]}"
