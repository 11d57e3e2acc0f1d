"""The clock of one pass over data: what the progress line and the history read. It only counts; it prints nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from lockstep.errors import DataError
from lockstep.replicas.device.async_scalars import AsyncScalars

Sums = tuple[AsyncScalars, int]
"""Numbers that begin with so many pairs of a total and its count."""


class LossNow(NamedTuple):
    """The loss at one moment of a pass.

    Args:
        known_total: what had been read then.
        known_count: likewise.
        arriving: what had not.
    """

    known_total: float
    known_count: float
    arriving: tuple[Sums, ...]

    @property
    def arrived(self) -> bool:
        """Whether ``value`` would not wait."""
        return all(sums.arrived for sums, _ in self.arriving)

    @property
    def counted(self) -> bool:
        """Whether anything was counted. Waits where only the device knows."""
        return bool(self.known_count or _added(0.0, 0.0, self.arriving)[1])

    @property
    def value(self) -> float:
        """Summed total / summed count; NaN while nothing was counted."""
        return _mean(*_added(self.known_total, self.known_count, self.arriving))


class RunningLoss:
    """The summed losses and counts of a pass. Those that have not arrived from a device are added when they are read.

    Args:
        total: what the pass begins with.
        count: likewise.
    """

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self._total = total
        self._count = count
        self._arriving: deque[Sums] = deque()

    def add(self, sums: AsyncScalars, pairs: int) -> None:
        """Adds the sums of one step, or of one update of all replicas.

        Args:
            sums: begins with a total and its count, the next total and its count, and so on.
            pairs: how many of them there are.
        """
        self._arriving.append((sums, pairs))
        while self._arriving and self._arriving[0][0].arrived:
            self._take()

    @property
    def total(self) -> float:
        """The summed losses."""
        self._take_all()
        return self._total

    @property
    def count(self) -> float:
        """The summed counts."""
        self._take_all()
        return self._count

    @property
    def value(self) -> float:
        """Summed total / summed count: the mean over all that was counted; NaN while nothing was."""
        return self.now().value

    def now(self) -> LossNow:
        """The value that there is now, to be read when somebody asks for it."""
        return LossNow(self._total, self._count, tuple(self._arriving))

    def final(self) -> float:
        """The value at the end of the pass.

        Raises:
            DataError: nothing was counted, so there is no loss.
        """
        if not self.count:
            raise DataError(
                "the loss counted nothing over the whole data: all batches have 0 rows, or the loss's counts are 0; "
                "give data with examples to count"
            )
        return self.value

    def _take_all(self) -> None:
        while self._arriving:
            self._take()

    def _take(self) -> None:
        self._total, self._count = _added(self._total, self._count, (self._arriving.popleft(),))


def _added(total: float, count: float, arriving: Sequence[Sums]) -> tuple[float, float]:
    for sums, pairs in arriving:
        numbers = sums.read()
        for pair in range(pairs):
            total += numbers[2 * pair]
            count += numbers[2 * pair + 1]
    return total, count


def _mean(total: float, count: float) -> float:
    return total / count if count else float("nan")


Read = Callable[[], Mapping[str, float]]


class LazyLogs(dict[str, float]):
    """A dict whose values are read together, at the first that is asked for.

    Args:
        names: the keys.
        read: gives the value of every name, the same ones whenever it is called.
        arrived: whether ``read`` would not wait.
    """

    def __init__(self, names: Sequence[str], read: Read, arrived: Callable[[], bool]) -> None:
        super().__init__(dict.fromkeys(names, float("nan")))
        self._names = tuple(names)
        self._read: Read | None = read
        self._unread = read
        self._arrived = arrived

    @property
    def arrived(self) -> bool:
        """Whether looking at a value does not wait."""
        return self._read is None or self._arrived()

    def own_copy(self) -> LazyLogs:
        """Another dict of the same numbers, which is not read by this."""
        return LazyLogs(self._names, self._unread, self._arrived)

    def __iter__(self) -> Iterator[str]:
        # Also has dict(logs) and {**logs} ask for the values one by one, instead of copying what stands here for them.
        return super().__iter__()

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        return dict, (dict(self),)

    def _fill(self) -> None:
        read, self._read = self._read, None
        if read is not None:
            dict.update(self, read())


def _filled(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def call(logs: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        logs._fill()
        return method(logs, *args, **kwargs)

    call.__name__ = name
    return call


# All that looks at a value, or changes what is there.
for _name in (
    *("__getitem__", "get", "items", "values", "pop", "popitem", "setdefault", "copy", "update", "clear"),
    *("__setitem__", "__delitem__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"),
):
    setattr(LazyLogs, _name, _filled(_name))


def copy_logs(logs: Mapping[str, float] | None) -> dict[str, float]:
    """A callback's own copy of the logs."""
    return logs.own_copy() if isinstance(logs, LazyLogs) else dict(logs or {})


def batch_logs(loss: LossNow, names: Sequence[str], metrics: AsyncScalars) -> dict[str, float]:
    """The logs of a batch: plain where everything is known.

    Args:
        loss: of the pass so far.
        names: of the metrics' values.
        metrics: those values.
    """

    def read() -> dict[str, float]:
        return {"loss": loss.value, **dict(zip(names, metrics.read(), strict=True))}

    def arrived() -> bool:
        return loss.arrived and metrics.arrived

    return read() if arrived() else LazyLogs(["loss", *names], read, arrived)


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """How long the training part of one epoch took; validation and callbacks are not in it.

    Args:
        epoch: the epoch, from 0.
        seconds: the sum over the steps, reading of the batches included.
        steps: global batches.
        examples: rows of all replicas.
        median_step_s: the median over the epoch's steps, reading of the batch included, in seconds.
    """

    epoch: int
    seconds: float
    steps: int
    examples: int
    median_step_s: float

    @property
    def examples_per_s(self) -> float:
        """Examples a second over the whole epoch."""
        return self.examples / self.seconds if self.seconds > 0 else 0.0


class History:
    """The record of one ``fit``, with Keras's names.

    ``history`` maps each name of the logs ("loss", "accuracy", "val_loss" ...) to a list with one number per epoch in
    which it was logged; ``epoch`` lists the epochs, from 0; ``timing`` has one EpochTiming per epoch.

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


class StepClock:
    """Times the steps of one pass: ``start`` before a batch is asked for, ``stop`` when its step is done.

    What lies between ``stop`` and ``start``, or ``pause`` and ``start``, is not the step's: callbacks, above all.

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
        """A batch is about to be asked for, or its step to be run."""
        self._started = time.perf_counter()

    def pause(self) -> None:
        """The batch is there; what comes until the next ``start`` is not timed."""
        self._before_pause += time.perf_counter() - self._started

    def stop(self, *, rows: int) -> None:
        """The step is done; ``rows`` is the number of examples of all replicas."""
        self._step_seconds.append(self._before_pause + time.perf_counter() - self._started)
        self._before_pause = 0.0
        self.examples += rows

    def extend(self) -> None:
        """What passed since ``start`` is the last step's too: the device was still at it."""
        if self._step_seconds:
            self._step_seconds[-1] += time.perf_counter() - self._started

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self._step_seconds)

    @property
    def seconds(self) -> float:
        """The sum over the steps done."""
        return sum(self._step_seconds)

    @property
    def median_step_s(self) -> float:
        """The median step in seconds; 0 before the first."""
        return median(self._step_seconds) if self._step_seconds else 0.0

    @property
    def examples_per_s(self) -> float:
        """Examples a second so far; 0 before the first step."""
        return self.examples / self.seconds if self._step_seconds else 0.0

    def summary(self, epoch: int) -> EpochTiming:
        """The record of the pass for ``History.timing``."""
        return EpochTiming(
            epoch=epoch,
            seconds=self.seconds,
            steps=self.steps,
            examples=self.examples,
            median_step_s=self.median_step_s,
        )
