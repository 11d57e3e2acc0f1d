"""What the workers tell each other while they iterate over data together.

    SameDataSync   begin: compare the lengths of the data; all take the chief's generator states
                   the first time: compare a few rows of data that is read by index
                   each batch: its digest is compared in the next exchange, whatever that is for
                   end: all workers have come to it, after the same number of batches
    OwnDataSync    before each batch: who has one? Workers without one get an empty batch

Everything here runs in the consumer's thread, where batches are handed out, never in the thread that reads ahead:
there the order of the collectives would differ between workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.prefetch import ClosableIterator
from lockstep.data.random_state import default_state, set_default_state
from lockstep.data.readers import CheckedBatch, Reader
from lockstep.data.row_sample import compare_rows
from lockstep.data.sharding import with_no_rows
from lockstep.data.sources import batches_in
from lockstep.data.structure import map_leaves
from lockstep.errors import ClusterError, DataError

_UNKNOWN = -1
_BEGIN = "the beginning of an iteration over the data"


class WorkerSync:
    """Keeps the workers in step while they iterate over one source; this base class is for one worker alone.

    Every worker must make the same calls.
    """

    part: tuple[int, int] | None = None
    """This worker's index and the number of workers, where each reads data of its own; None where all read the same."""

    def begin(self) -> None:
        """Is called when an iteration begins, before the source's own iteration begins."""

    def compare(self) -> None:
        """Is called when an iteration has begun, before its first batch is read."""

    def wrap(self, batches: ClosableIterator[Any], left_out: Callable[[], Any]) -> ClosableIterator[Any]:
        """Returns the batches as the consumer gets them.

        ``left_out`` returns a batch that came before them, or None if there was none; an empty batch is made like it.
        """
        return batches

    def length(self, reader_length: int | None) -> int | None:
        """Returns the number of batches that the consumer gets of a reader of ``reader_length``. None is unknown."""
        return reader_length


class SameDataSync(WorkerSync):
    """For workers that all read the same global batches, each taking its part.

    The ``generators`` of their ``reader`` get the chief's states, beside torch's default one.
    """

    def __init__(self, workers: Communicator, reader: Reader) -> None:
        self._workers = workers
        self._reader = reader
        self._compared = False

    def begin(self) -> None:
        start_together(self._workers, self._reader.dataset, self._reader.generators)

    def compare(self) -> None:
        """Compares a few rows, once; the chief warns. Raises ClusterError if a worker has others."""
        rows = self._reader.sampled
        if rows is None or self._compared:
            return
        self._compared = True
        warning = compare_rows(self._workers.processes, rows, self._reader.read_again)
        if warning and self._workers.is_chief:
            warnings.warn(warning, stacklevel=2)

    def wrap(self, batches: ClosableIterator[CheckedBatch], left_out: Callable[[], Any]) -> Generator[Any, None, None]:
        batches_read = 0
        with closing(batches):
            self._workers.set_status(f"the wait for batch {batches_read} of its data")
            for checked in batches:
                batches_read += 1
                # It travels with the next exchange, whatever that is for (test_no_batch_costs_an_exchange_of_its_own).
                self._workers.add_digest(checked.digest)
                yield checked.batch
                del checked  # while the next one is made
                self._workers.set_status(f"the wait for batch {batches_read} of its data")
        # A worker whose data ends early comes to this call while others come to the next step's; the name says after
        # how many batches (test_an_end_that_comes_early_is_named).
        self._workers.all_gather_numbers(f"the end of the data, after {batches_read} global batches")


class OwnDataSync(WorkerSync):
    """For workers that each read their own batches, ``length`` many or an unknown number.

    Every worker makes this object. The iteration ends when the last worker's data has ended.
    """

    def __init__(self, workers: Communicator, length: int | None) -> None:
        self._workers = workers
        self.part = (workers.index, workers.size)
        lengths = workers.all_gather_numbers("the lengths of the workers' own data", (_length_number(length),))
        self._longest = None if (_UNKNOWN,) in lengths else int(max(lengths)[0])

    def length(self, reader_length: int | None) -> int | None:
        """Returns the length of the longest worker's data when this object was made."""
        return self._longest

    def wrap(self, batches: ClosableIterator[Any], left_out: Callable[[], Any]) -> Generator[Any, None, None]:
        """This worker's batches, then empty batches while other workers still have some."""
        batch, empty = None, None
        ended, batches_read = False, 0
        with closing(batches):
            while True:
                if not ended:
                    self._workers.set_status(f"the wait for batch {batches_read} of its own data")
                    batch = next(batches, None)
                    ended = batch is None
                if empty is None and (like := left_out() if batch is None else batch) is not None:
                    empty = _emptied(like)
                answers = self._workers.all_gather_numbers(
                    "the next batch of the workers' own data", (not ended, empty is not None)
                )
                if not any(has for has, _ in answers):
                    return
                for name, (_, had_one) in zip(self._workers.names, answers, strict=True):
                    if not had_one:  # so that it could not make an empty one
                        raise DataError(f"the data of {name} has no batch; give every worker at least one")
                batches_read += 1
                yield empty if ended else batch
                batch = None  # while the next one is made


def _emptied(batch: Any) -> Any:
    return map_leaves(
        lambda _, leaf: PerReplica([with_no_rows(value) for value in leaf]),
        batch,
        attributes=lambda attributes: attributes and PerReplica([value.part(0, 0) for value in attributes]),
    )


def start_together(workers: Communicator, dataset: Iterable[Any], generators: Sequence[torch.Generator]) -> None:
    """Compares the data of all workers, and gives their generators the chief's states. Every worker must call it.

    Raises ClusterError if a worker's data has another length, or other generators, than the chief's.
    """
    # Equal numbers of batches may hide a few more examples.
    is_mapped = isinstance(dataset, DataLoader) and not isinstance(dataset.dataset, IterableDataset)
    examples = batches_in(dataset.dataset) if is_mapped else None  # type: ignore[attr-defined]
    lengths = (_length_number(batches_in(dataset)), _length_number(examples), len(generators))
    _check_equal(workers.all_gather_numbers(_BEGIN, lengths), workers.names)
    states = [default_state(), *(generator.get_state() for generator in generators)] if workers.is_chief else []
    default, *states_of_data = all_gather_object(workers.processes, f"{_BEGIN}: the chief's generators", states)[0]
    if not workers.is_chief:
        set_default_state(default)
        for generator, state in zip(generators, states_of_data, strict=True):
            generator.set_state(state)


def _length_number(length: int | None) -> int:
    return _UNKNOWN if length is None else length


def _check_equal(lengths: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    for name, worker_lengths in zip(names, lengths, strict=True):
        for unit, value, chief in zip(
            ("global batches", "examples", "torch.Generators"), worker_lengths, lengths[0], strict=True
        ):
            if value != chief:
                raise ClusterError(
                    f"the workers' data differ: {name} has {_amount(value)} {unit}, {names[0]} has {_amount(chief)}; "
                    'give every worker the same data, or distribute its own with shard="off"'
                )


def _amount(value: float) -> str:
    return "an unknown number of" if value == _UNKNOWN else str(int(value))
