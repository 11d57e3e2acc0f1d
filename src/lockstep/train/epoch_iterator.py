"""EpochIterator: the batches of each epoch, and the position in the data for checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lockstep.checks import check_number
from lockstep.data.dataset import DistributedDataset
from lockstep.data.random_state import without_default
from lockstep.data.resumable_iteration import DataIteration, DistributedIterable
from lockstep.errors import CheckpointError, DataError
from lockstep.strategies.base import Strategy


def distribute(strategy: Strategy, data: Iterable[Any] | DistributedIterable) -> DistributedIterable:
    """The data sharded over the strategy's replicas. A distributed dataset is returned as it is.

    Raises DataError for one that is divided by ``ls.divide``.
    """
    if isinstance(data, DistributedIterable):
        # A loss of rows is compared with those of parts of the shard, which would cut flat tensors anywhere.
        if data.is_divided_by_example:
            raise DataError(
                "received data with divide=..., but fit, evaluate and predict take one row an example; use it in a "
                "loop of your own, with strategy.run(step, (batch,))"
            )
        return data
    return DistributedDataset(data, strategy.devices, workers=strategy.workers, items=True)


@dataclass
class _Iteration:
    """An open iteration of the data, and the epoch in which it began."""

    batches: DataIteration
    epoch: int


class EpochIterator:
    """The batches of each epoch.

    Without ``steps_per_epoch`` an epoch is one iteration of the data. With it an epoch is that many global batches, and
    the next one goes on where it ended. When the data ends it is iterated again, as in Keras. With ``first`` an epoch
    is the first so many global batches, the same ones each time.

    ``name`` is for messages, such as "the training data".
    """

    def __init__(
        self, data: DistributedIterable, *, name: str, steps_per_epoch: int | None = None, first: int | None = None
    ) -> None:
        for argument, value in (("steps_per_epoch", steps_per_epoch), ("validation_steps", first)):
            check_number(argument, value, least=1, whole=True)
        self._data, self._name, self._steps, self._first = data, name, steps_per_epoch, first
        self._gave = False
        self._open: _Iteration | None = None
        self._saved: Mapping[str, Any] | None = None

    @property
    def steps(self) -> int | None:
        """Global batches per epoch, at most if their number is only limited; None if unknown."""
        if self._steps is not None:
            return self._steps
        try:
            batches = len(self._data)
        except TypeError:
            return self._first
        return batches if self._first is None else min(batches, self._first)

    def epoch(self, epoch: int, *, skip: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch, counted from 0. Close the generator, or read it to its end.

        ``skip`` is how many of its global batches an interrupted run has done, whose state was loaded.

        Raises:
            DataError: there is no batch, or fewer than ``steps_per_epoch`` and the data cannot be iterated again.
            CheckpointError: the state that was loaded is of another position.
        """
        return self._whole(epoch, skip) if self._steps is None else self._part(epoch, self._steps, skip)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch: how many batches of the iteration that began in ``epoch`` have passed.

        ``epoch`` is -1 if none is open. ``random`` holds the states of the generators when it began; between iterations
        without torch's default generator, which belongs to the caller. An open one has all of
        ``Position.state_dict``.
        """
        if self._open is not None:
            return {"epoch": self._open.epoch, **self._open.batches.position.state_dict()}
        random, attributes = without_default(self._data.random_state()), self._data.attribute_state()
        return {"passed": 0, "epoch": -1, "random": random, "attributes": attributes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next call of ``epoch`` begin at the position that ``state_dict`` returned."""
        self.close()
        self._saved = dict(state)

    def close(self) -> None:
        """Ends an open iteration, and the thread that prefetches for it."""
        if self._open is not None:
            self._open.batches.close()
            self._open = None

    def _whole(self, epoch: int, skip: int) -> Generator[Any, None, None]:
        saved = self._take_saved()
        if saved is not None and (saved["epoch"], saved["passed"]) not in ((epoch, skip), (-1, skip)):
            raise CheckpointError(
                f"the saved position of {self._name} is epoch {saved['epoch'] + 1}, batch {saved['passed']}, not epoch "
                f"{epoch + 1}, batch {skip}; resume where it was saved"
            )
        iteration = self._open = self._begin(epoch, saved, skip)
        with closing(iteration.batches):
            try:
                for batch in islice(iteration.batches, self._first):
                    self._gave = True
                    yield batch
            finally:
                self._open = None if self._open is iteration else self._open
        if not iteration.batches.position.passed:
            raise self._empty(epoch)

    def _part(self, epoch: int, steps: int, skip: int) -> Generator[Any, None, None]:
        if self._saved is None:
            for _ in range(skip):
                self._next(epoch)
        for _ in range(steps - skip):
            yield self._next(epoch)

    def _next(self, epoch: int) -> Any:
        # The open iteration may be at its end. The one after it has a batch, unless there is none at all.
        for _ in range(2):
            if self._open is None:
                self._open = self._begin(epoch, self._take_saved(), 0)
            for batch in self._open.batches:
                self._gave = True
                return batch
            self.close()
        raise self._empty(epoch)

    def _take_saved(self) -> Mapping[str, Any] | None:
        saved, self._saved = self._saved, None
        return saved

    def _begin(self, epoch: int, saved: Mapping[str, Any] | None, skip: int) -> _Iteration:
        """A new iteration, or the one of a saved position."""
        if saved is None or saved["epoch"] < 0:
            self._data.load_attributes(saved or {})  # before the epoch that they may count
            self._data.set_epoch(epoch)
            return _Iteration(self._data.iterate(skip=skip, random=None if saved is None else saved["random"]), epoch)
        self._data.set_epoch(saved["epoch"])
        return _Iteration(self._data.resume(saved), saved["epoch"])

    def _empty(self, epoch: int) -> DataError:
        when = "" if epoch == 0 else f" for epoch {epoch + 1}"
        hint = f"{when}: a generator can be read only once" if self._gave else when
        return DataError(f"{self._name} gave no batches{hint}; give a DataLoader or a list with at least one batch")
