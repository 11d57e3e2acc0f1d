"""The numbers that fit reports: the running loss, the logs of a batch, the clock of a pass, and the History.

A GPU may still be computing the numbers of a batch. They are read when somebody asks for them, so that a callback
which looks at no number does not make the loop wait for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.errors import DataError
from lockstep.replicas.device.driver import AsyncScalars

Pending = tuple[AsyncScalars, int]
"""Numbers that a device may still be computing, and how many (total, count) pairs they begin with."""


@dataclass(frozen=True)
class LossSoFar:
    """The loss of a pass at one moment.

    Args:
        total: sum of the losses that had been read by then.
        count: their count.
        pending: what had not been read by then.
    """

    total: float
    count: float
    pending: tuple[Pending, ...]

    @property
    def arrived(self) -> bool:
        """Whether ``value`` can be read without waiting for the device."""
        return all(numbers.arrived for numbers, _ in self.pending)

    @property
    def counted(self) -> bool:
        """Whether anything was counted. Waits for the device if its numbers have not arrived."""
        return bool(_add(self.total, self.count, self.pending)[1])

    @property
    def value(self) -> float:
        """The summed total over the summed count; NaN while the count is 0."""
        total, count = _add(self.total, self.count, self.pending)
        return total / count if count else float("nan")


class RunningLoss:
    """The summed losses and counts of a pass. The mean is taken when it is read.

    Args:
        total: the sum to begin with.
        count: the count to begin with.
    """

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self._total = total
        self._count = count
        self._pending: deque[Pending] = deque()

    def add(self, numbers: AsyncScalars, pairs: int) -> None:
        """Adds the sums of one step, or of one update of all replicas.

        Args:
            numbers: begin with ``pairs`` times a total and its count.
            pairs: the number of pairs.
        """
        self._pending.append((numbers, pairs))
        while self._pending and self._pending[0][0].arrived:
            self._take()

    @property
    def total(self) -> float:
        """The summed losses. Waits for the device."""
        self._take_all()
        return self._total

    @property
    def count(self) -> float:
        """The summed counts. Waits for the device."""
        self._take_all()
        return self._count

    @property
    def value(self) -> float:
        """The mean over everything that was counted; NaN while nothing was. Waits for the device."""
        return self.now().value

    def now(self) -> LossSoFar:
        """The loss at this moment, which can be read later."""
        return LossSoFar(self._total, self._count, tuple(self._pending))

    def final(self) -> float:
        """The mean at the end of a pass.

        Raises:
            DataError: nothing was counted.
        """
        if not self.count:
            raise DataError(
                "the loss counted nothing over the whole data: every batch has 0 rows, or the loss returns counts of "
                "0; give data with at least one example that counts"
            )
        return self.value

    def _take_all(self) -> None:
        while self._pending:
            self._take()

    def _take(self) -> None:
        self._total, self._count = _add(self._total, self._count, (self._pending.popleft(),))


def _add(total: float, count: float, pending: Sequence[Pending]) -> tuple[float, float]:
    for arriving, pairs in pending:
        numbers = arriving.read()
        for pair in range(pairs):
            total += numbers[2 * pair]
            count += numbers[2 * pair + 1]
    return total, count


class LazyLogs(dict[str, float]):
    """A dict of floats. The first access to a value reads all of them from the device.

    Args:
        names: the keys.
        read: returns the value of every name; it may be called more than once.
        arrived: whether ``read`` would return without waiting.
    """

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
        """A dict of the same numbers, which does not see changes of this one and is read by itself."""
        return LazyLogs(*self._source)

    def __iter__(self) -> Iterator[str]:
        # Defined so that dict(logs) and {**logs} ask for the values one by one instead of copying the placeholders.
        return super().__iter__()

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        return dict, (dict(self),)

    def _fill(self) -> None:
        if not self._filled:
            self._filled = True
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


def batch_logs(loss: LossSoFar, names: Sequence[str], metrics: AsyncScalars) -> dict[str, float]:
    """The logs of a batch: a plain dict if every number is known, else LazyLogs.

    Args:
        loss: the loss of the pass so far.
        names: the names of the metrics' values.
        metrics: the metrics' values.
    """

    def read() -> dict[str, float]:
        return {"loss": loss.value, **dict(zip(names, metrics.read(), strict=True))}

    def arrived() -> bool:
        return loss.arrived and metrics.arrived

    return read() if arrived() else LazyLogs(["loss", *names], read, arrived)


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """How long the training part of one epoch took, without validation and callbacks.

    Args:
        epoch: the epoch, counted from 0.
        seconds: the sum over the steps, including the reading of the batches.
        steps: the number of global batches.
        examples: the number of rows, over all replicas.
        median_step_s: the median step in seconds, including the reading of its batch.
    """

    epoch: int
    seconds: float
    steps: int
    examples: int
    median_step_s: float

    @property
    def examples_per_s(self) -> float:
        """Examples per second over the whole epoch."""
        return self.examples / self.seconds if self.seconds > 0 else 0.0


class StepClock:
    """Times the steps of one pass: call ``start`` before a batch is read and ``stop`` when its step is done.

    The time between ``stop`` or ``pause`` and the next ``start``, which callbacks take, is not counted.

    Example:
        >>> clock = StepClock()
        >>> clock.start()
        >>> clock.stop(rows=8)
        >>> clock.steps, clock.examples
        (1, 8)
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._before_pause = 0.0
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
    def steps(self) -> int:
        """The number of steps so far."""
        return len(self._step_seconds)

    @property
    def seconds(self) -> float:
        """The sum over the steps so far."""
        return sum(self._step_seconds)

    @property
    def median_step_s(self) -> float:
        """The median step in seconds; 0 before the first."""
        return median(self._step_seconds) if self._step_seconds else 0.0

    @property
    def examples_per_s(self) -> float:
        """Examples per second so far; 0 before the first step."""
        return self.examples / self.seconds if self._step_seconds else 0.0

    def summary(self, epoch: int) -> EpochTiming:
        """The EpochTiming of the pass."""
        return EpochTiming(
            epoch=epoch,
            seconds=self.seconds,
            steps=self.steps,
            examples=self.examples,
            median_step_s=self.median_step_s,
        )


class History:
    """The record of one ``fit``, with Keras's names.

    ``history`` maps each name of the logs ("loss", "accuracy", "val_loss" ...) to a list with one number per epoch in
    which it was logged. ``epoch`` lists the epochs, counted from 0. ``timing`` has one EpochTiming per epoch.

    Example:
        >>> history = History()
        >>> history.add(0, {"loss": 2.0})
        >>> history.history
        {'loss': [2.0]}
    """

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []
        self.timing: list[EpochTiming] = []

    def add(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Appends the logs of one epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def __repr__(self) -> str:
        return f"History(epochs={len(self.epoch)}, names={list(self.history)})"
