"""The numbers that fit reports: the running loss, the logs of a batch, the clock of a pass, and the History.

A GPU may still be computing the numbers of a batch. They are read when somebody asks for them, so that a callback
which looks at no number does not make the loop wait for the device.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.per_replica import PerReplica
from lockstep.collectives.sum_order import tree_sum
from lockstep.data.structure import is_plain, named_leaves
from lockstep.errors import DataError, NonFiniteLossError
from lockstep.extras import require
from lockstep.mirroring.optim.update import check_finite
from lockstep.replicas.device.async_scalars import AsyncScalars
from lockstep.train.curves import draw_curves

LEARNING_RATE = "learning_rate"
"""The name of the learning rate in the logs of epochs, as in Keras: that of the next update."""
MOST_AHEAD = 2
"""How many steps the loop may be ahead of the last step whose numbers it has read: with two steps queued a GPU never
waits for the host, and the batches of more would fill its memory."""


class RunningLoss:
    """The summed losses and counts of a pass. Reading ``rows``, ``total``, ``count`` or ``value`` waits for the device.

    Where replicas bring numbers of their own, each one's are added up apart, so that the sum of all has the same bits
    on every layout.

    A step is read when its numbers have arrived, or when it is ``MOST_AHEAD`` steps behind. Whatever reads a total that
    is NaN or infinite raises a NonFiniteLossError; the weights are those before that update.
    """

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self._rows = [(total, count)]
        self._pending: deque[tuple[AsyncScalars, int, int]] = deque()

    def add(self, numbers: AsyncScalars, *, epoch: int, step: int) -> None:
        """Adds a step, or an update of all replicas.

        ``numbers`` are pairs of a total and a count, of each replica or of all, and the total of the update, or 0,
        which is checked.
        """
        self._pending.append((numbers, epoch, step))
        while self._pending and (len(self._pending) > MOST_AHEAD or self._pending[0][0].arrived):
            self._take()

    def now(self) -> RunningLoss:
        """The loss at this moment, which can be read later."""
        copy = RunningLoss()
        copy._rows = self._rows.copy()
        copy._pending = self._pending.copy()
        return copy

    def state(self) -> list[list[float]]:
        """Returns the total and the count of each replica. Their sum would not do: later steps are added to each one's.

        Measured: with the sum, one loss of an epoch that was resumed in its middle differed in its last bit.
        """
        self.settle()
        return [list(row) for row in self._rows]

    @classmethod
    def restored(cls, state: Sequence[Sequence[float]]) -> RunningLoss:
        """From what ``state`` has returned, on any number of replicas."""
        loss = cls()
        loss._rows = [(total, count) for total, count in state]
        return loss

    @property
    def arrived(self) -> bool:
        """Whether the numbers can be read without waiting for the device."""
        return all(numbers.arrived for numbers, *_ in self._pending)

    def rows(self, replicas: int) -> list[tuple[float, float]]:
        """The total and the count of each of ``replicas`` replicas."""
        self.settle()
        return self._rows + [(0.0, 0.0)] * (replicas - len(self._rows))

    @property
    def total(self) -> float:
        """The summed losses."""
        self.settle()
        return tree_sum([total for total, _ in self._rows], operator.add)

    @property
    def count(self) -> float:
        """The summed counts."""
        self.settle()
        return tree_sum([count for _, count in self._rows], operator.add)

    @property
    def value(self) -> float:
        """The mean over everything that was counted; NaN while nothing was."""
        return self.total / self.count if self.count else float("nan")

    def final(self) -> float:
        """The mean at the end of a pass; a DataError if nothing was counted."""
        if not self.count:
            raise DataError(
                "the loss counted nothing over the whole data: every batch has 0 rows, or the loss returns counts of "
                "0; give data with at least one example that counts"
            )
        return self.value

    def settle(self) -> None:
        """Reads all steps."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        numbers, epoch, step = self._pending.popleft()
        *pairs, update = numbers.read()
        if not math.isfinite(update):
            with naming_step(epoch, step):
                check_finite(update)
        for replica, (total, count) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
            if replica == len(self._rows):
                self._rows.append((0.0, 0.0))
            before = self._rows[replica]
            self._rows[replica] = before[0] + total, before[1] + count


@contextmanager
def naming_step(epoch: int, step: int, batch: Any = None) -> Iterator[None]:
    """Puts the epoch, given from 0, and the step, given from 1, into the message of a NonFiniteLossError.

    If the batch of the step itself holds what is not finite, the message says where, in place of its advice.
    """
    try:
        yield
    except NonFiniteLossError as error:
        place = _not_finite(batch)
        advice = f"{place}; clean the data, or leave such rows out" if place else error.advice
        raise NonFiniteLossError(f"epoch {epoch + 1}, step {step}: {error.finding}", advice) from error


def _not_finite(batch: Any) -> str:
    """Which leaf of this worker's shards of a batch holds NaN or infinite numbers, and in which row; else nothing."""
    for name, leaf in named_leaves(batch):
        shards = [shard for shard in (leaf if isinstance(leaf, PerReplica) else (leaf,)) if _has_rows_of_floats(shard)]
        bad = [row for shard in shards for row in (~torch.isfinite(shard)).unsqueeze(-1).flatten(1).any(1).tolist()]
        if any(bad):
            where = f"{sum(bad)} of {len(bad)} rows, first in row {bad.index(True)}"
            return f"{name} of this step's batch is not finite in {where}"
    return ""


def _has_rows_of_floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0 and is_plain(leaf)


class LazyLogs(dict[str, float]):
    """A dict of floats. The first access to a value reads all of them with ``read``; ``arrived`` says if that waits."""

    def __init__(
        self, names: Sequence[str], read: Callable[[], Mapping[str, float]], arrived: Callable[[], bool]
    ) -> None:
        super().__init__(dict.fromkeys(names, float("nan")))
        self._source = (tuple(names), read, arrived)
        self._filled = False

    @property
    def arrived(self) -> bool:
        """Whether a value can be read without waiting for the device."""
        return self._filled or self._source[2]()

    def fresh_copy(self) -> LazyLogs:
        """The same numbers, without changes that were made to these."""
        return LazyLogs(*self._source)

    def __iter__(self) -> Iterator[str]:
        # Defined so that dict(logs) and {**logs} ask for the values one by one instead of copying the placeholders.
        return super().__iter__()

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        return dict, (dict(self),)

    def _fill(self) -> None:
        if not self._filled:
            self._filled = True
            # dict's own: the update of this class would ask for the values again.
            dict.update(self, self._source[1]())


def _filling(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def call(logs: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        logs._fill()
        return method(logs, *args, **kwargs)

    call.__name__ = name
    return call


# Every method that reads a value or changes the dict.
for _name in (
    *("__getitem__", "get", "items", "values", "pop", "popitem", "setdefault", "copy", "update", "clear"),
    *("__setitem__", "__delitem__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"),
):
    setattr(LazyLogs, _name, _filling(_name))


def copy_logs(logs: Mapping[str, float] | None) -> dict[str, float]:
    """A copy of the logs for one callback, which may change it."""
    return logs.fresh_copy() if isinstance(logs, LazyLogs) else dict(logs or {})


def batch_logs(loss: RunningLoss, names: Sequence[str], metrics: AsyncScalars) -> dict[str, float]:
    """The logs of a batch, a plain dict if every number is known: the loss so far, and the metrics by name."""

    def read() -> dict[str, float]:
        return {"loss": loss.value, **dict(zip(names, metrics.read(), strict=True))}

    def arrived() -> bool:
        return loss.arrived and metrics.arrived

    return read() if arrived() else LazyLogs(["loss", *names], read, arrived)


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """How long the training part of one epoch took, without validation and callbacks.

    Of an epoch that was interrupted in its middle and resumed, these are the steps since the last time it was resumed.
    """

    epoch: int  # counted from 0
    seconds: float  # the sum over the steps, including the reading of the batches
    steps: int  # global batches
    examples: int  # rows, over all replicas
    median_step_s: float  # including the reading of its batch

    @property
    def examples_per_s(self) -> float:
        """Examples per second over the whole epoch."""
        return self.examples / self.seconds if self.seconds > 0 else 0.0


class StepClock:
    """Times the steps of one pass: call ``start`` before a batch is read and ``stop`` when its step is done.

    The time between ``stop`` or ``pause`` and the next ``start``, which callbacks take, is not counted. ``examples``
    are the rows so far.
    """

    def __init__(self) -> None:
        self._started = self._before_pause = 0.0
        self._step_seconds: list[float] = []
        self.examples = 0

    def start(self) -> None:
        """Starts or resumes the time of a step."""
        self._started = time.perf_counter()

    def pause(self) -> None:
        """Stops the time until the next ``start``."""
        self._before_pause += time.perf_counter() - self._started

    def stop(self, *, rows: int) -> None:
        """Ends a step of ``rows`` examples, over all replicas."""
        self._step_seconds.append(self._before_pause + time.perf_counter() - self._started)
        self._before_pause = 0.0
        self.examples += rows

    def extend(self) -> None:
        """Adds the time since ``start`` to the last step, which the device was still computing."""
        if self._step_seconds:
            self._step_seconds[-1] += time.perf_counter() - self._started

    @property
    def last_step_s(self) -> float:
        """The seconds of the last step, including the reading of its batch; 0 before the first."""
        return self._step_seconds[-1] if self._step_seconds else 0.0

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return len(self._step_seconds)

    def summary(self, epoch: int = 0) -> EpochTiming:
        """The times of the pass so far."""
        return EpochTiming(
            epoch=epoch,
            seconds=sum(self._step_seconds),
            steps=self.steps,
            examples=self.examples,
            median_step_s=median(self._step_seconds) if self._step_seconds else 0.0,
        )


@dataclass(eq=False, repr=False)
class History:
    """The record of one ``fit``, with Keras's names.

    ``history`` maps each name of the logs ("loss", "accuracy", "val_loss" ...) to a list with one number per epoch in
    which it was logged. ``epoch`` lists the epochs, counted from 0. ``timing`` has one EpochTiming per epoch, and
    ``logged_in`` the epochs of each name.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    epoch: list[int] = field(default_factory=list)
    timing: list[EpochTiming] = field(default_factory=list)
    logged_in: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> History:
        """The History that ``dataclasses.asdict`` made ``saved`` of."""
        return cls(**{**saved, "timing": [EpochTiming(**entry) for entry in saved["timing"]]})

    def add(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Appends the logs of one epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
            self.logged_in.setdefault(name, []).append(epoch)

    def plot(self) -> Any:
        """Draws a panel for the loss and one for each metric, with the validation beside the training.

        Returns:
            A matplotlib Figure. A notebook shows it, and ``plot().savefig("curves.png")`` writes it.

        Raises:
            DataError: nothing was logged.
            MissingExtraError: matplotlib is not installed.
        """
        pyplot = require("matplotlib.pyplot", "plots")
        figure = pyplot.figure()
        pyplot.close(figure)  # otherwise a notebook would show it twice
        draw_curves(figure, self)
        return figure

    def __repr__(self) -> str:
        return f"History(epochs={len(self.epoch)}, names={list(self.history)})"
