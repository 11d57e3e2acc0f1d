"""What the workers have to say to each other while they iterate over data together.

    SameBatches   begin: lengths compared, the chief's generators for all
                  each batch: its digest rides on the next exchange, whatever that is for
                  end: all have come to it, after as many batches
    OwnBatches    before each batch an exchange: who has one? Those who have none get an empty one

All of it happens in the consumer's thread, where the batches are handed out, never in the thread that reads ahead:
there the order of the calls would differ between workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lockstep.collectives.communicator import Workers
from lockstep.data.beginning import begin_alike
from lockstep.data.empty_batch import packed, unpacked, without_rows
from lockstep.data.prefetch import ClosableIterator
from lockstep.data.readers import Alike, Place, Reader

_UNKNOWN = -1.0


class Meeting(ABC):
    """How the workers keep together while they iterate over one source."""

    @abstractmethod
    def begin(self, reader: Reader) -> None:
        """Called on every worker when an iteration begins, before that of the source."""

    @abstractmethod
    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches as the consumer gets them."""

    @abstractmethod
    def length(self, reader: Reader) -> int | None:
        """The number of batches that the consumer gets, or None where it is unknown."""


class Alone(Meeting):
    """One worker: nobody to meet."""

    def begin(self, reader: Reader) -> None:
        """Nothing has to be said."""

    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches as they are."""
        return batches

    def length(self, reader: Reader) -> int | None:
        """The reader's."""
        return reader.length


class SameBatches(Meeting):
    """All workers read the same global batches, and each gets its part."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def begin(self, reader: Reader) -> None:
        """Compares the lengths and takes the chief's generators."""
        begin_alike(self._workers, reader.dataset, reader.generators)

    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches, whose digests are compared; they must end on all workers together."""
        return _Compared(batches, self._workers)

    def length(self, reader: Reader) -> int | None:
        """The reader's, which is every worker's."""
        return reader.length


class OwnBatches(Meeting):
    """Each worker reads batches of its own; the iteration ends when the last one has ended.

    Args:
        workers: all workers, every one of which makes this object.
        reader: this worker's.
    """

    def __init__(self, workers: Workers, reader: Reader) -> None:
        self._workers = workers
        own = _UNKNOWN if reader.length is None else reader.length
        lengths = [length for (length,) in workers.exchange("the lengths of the workers' own data", (own,))]
        self._longest = None if _UNKNOWN in lengths else int(max(lengths))

    def begin(self, reader: Reader) -> None:
        """Nothing has to be alike."""

    def hand_out(self, batches: ClosableIterator[Any], place: Place) -> ClosableIterator[Any]:
        """The batches, and empty ones while others still have some."""
        return _Padded(batches, self._workers, place)

    def length(self, reader: Reader) -> int | None:
        """The longest of all workers', as it was when this was made."""
        return self._longest


class _Compared:
    def __init__(self, batches: ClosableIterator[Alike], workers: Workers) -> None:
        self._batches = batches
        self._workers = workers
        self._taken = 0
        self._ended = False

    def __iter__(self) -> _Compared:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        self._workers.doing(f"the wait for batch {self._taken} of its data")
        handed = next(self._batches, None)
        if handed is None:
            self._ended = True
            self._workers.exchange(f"the end of the data, after {self._taken} global batches")
            raise StopIteration
        self._taken += 1
        self._workers.attach(handed.digest)
        return handed.batch

    def close(self) -> None:
        """Ends the reading; the other workers are expected to do so at the same place."""
        self._ended = True
        self._batches.close()


class _Padded:
    def __init__(self, batches: ClosableIterator[Any], workers: Workers, place: Place) -> None:
        self._batches = batches
        self._workers = workers
        self._place = place
        self._empty: Any = None
        self._taken = 0
        self._ended = self._all_ended = False

    def __iter__(self) -> _Padded:
        return self

    def __next__(self) -> Any:
        if self._all_ended:
            raise StopIteration
        batch = self._own()
        met = self._workers.exchange(
            "the next batch of the workers' own data", (not self._ended, self._empty is not None)
        )
        if not any(has for has, _ in met):
            self._all_ended = True
            raise StopIteration
        if not all(knows for _, knows in met):
            self._learn([bool(has) for has, _ in met].index(True))
        self._taken += 1
        return self._empty if self._ended else batch

    def close(self) -> None:
        """Ends the reading; the other workers are expected to do so at the same place."""
        self._ended = self._all_ended = True
        self._batches.close()

    def _own(self) -> Any:
        if self._ended:
            return None
        self._workers.doing(f"the wait for batch {self._taken} of its own data")
        batch = next(self._batches, None)
        self._ended = batch is None
        if batch is not None and self._empty is None:
            self._empty = without_rows(batch)
        return batch

    def _learn(self, teacher: int) -> None:
        """Gives the structure of a batch to those workers that never had one."""
        payload = packed(self._empty) if teacher == self._workers.index else b""
        everyones = self._workers.exchange_bytes("the structure of a batch", payload)
        if self._empty is None:
            replicas = self._workers.replicas[self._workers.index]
            self._empty = self._place(unpacked(everyones[teacher], replicas))
