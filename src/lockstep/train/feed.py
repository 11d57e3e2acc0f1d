"""Where the loops get their batches: one iteration per epoch, or a fixed number of steps from one long iteration."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any

from lockstep.data.distributed import DistributedDataset, PerReplicaDataset
from lockstep.data.prefetch import ClosableIterator
from lockstep.errors import ConfigError, DataError
from lockstep.strategies.base import Strategy

Distributed = DistributedDataset | PerReplicaDataset


def distribute(strategy: Strategy, data: Iterable[Any] | Distributed) -> Distributed:
    """The data divided among the strategy's replicas; data that is distributed already stays as it is."""
    if isinstance(data, (DistributedDataset, PerReplicaDataset)):
        return data
    return strategy.distribute_dataset(data)


def known_length(data: Distributed) -> int | None:
    """The number of global batches, or None where the source does not say."""
    try:
        return len(data)
    except TypeError:
        return None


class Feed:
    """The batches of each epoch.

    Without ``steps_per_epoch`` an epoch is one iteration of the data. With it an epoch is that many global batches, and
    the next one goes on where it ended; data that ends is begun anew, as in Keras.

    Args:
        data: the distributed data.
        name: what to call it in messages: "the training data".
        steps_per_epoch: global batches per epoch, or None.

    Raises:
        ConfigError: ``steps_per_epoch`` is no positive integer.
    """

    def __init__(self, data: Distributed, *, name: str, steps_per_epoch: int | None = None) -> None:
        if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
            raise ConfigError(f"steps_per_epoch={steps_per_epoch!r}; give a number of global batches, or None")
        self._data = data
        self._name = name
        self._steps = steps_per_epoch
        self._gave = False
        self._open: ClosableIterator[Any] | None = None

    @property
    def steps(self) -> int | None:
        """Global batches per epoch, or None where unknown."""
        return self._steps if self._steps is not None else known_length(self._data)

    def epoch(self, epoch: int) -> Generator[Any, None, None]:
        """The epoch's batches. Close the generator, or read it to its end.

        Raises:
            DataError: there is no batch, or fewer than ``steps_per_epoch`` where the data cannot be begun anew.
        """
        return self._whole(epoch) if self._steps is None else self._part(epoch, self._steps)

    def close(self) -> None:
        """Ends an iteration that is still open, and the thread that reads ahead for it."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _whole(self, epoch: int) -> Generator[Any, None, None]:
        self._data.set_epoch(epoch)
        empty = True
        with closing(iter(self._data)) as batches:
            for batch in batches:
                empty, self._gave = False, True
                yield batch
        if empty:
            raise self._empty(epoch)

    def _part(self, epoch: int, steps: int) -> Generator[Any, None, None]:
        for _ in range(steps):
            yield self._next(epoch)

    def _next(self, epoch: int) -> Any:
        for _ in range(2):
            if self._open is None:
                self._data.set_epoch(epoch)
                self._open = iter(self._data)
            for batch in self._open:
                self._gave = True
                return batch
            self.close()
        raise self._empty(epoch)

    def _empty(self, epoch: int) -> DataError:
        when = "" if epoch == 0 else f" for epoch {epoch + 1}"
        hint = f"{when}: a generator can be read only once" if self._gave else when
        return DataError(f"{self._name} gave no batches{hint}; give a DataLoader or a list with at least one batch")
