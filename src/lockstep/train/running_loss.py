"""The loss of a pass so far: sums and counts, divided only when they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.errors import DataError
from lockstep.replicas.device.async_scalars import Arriving

Sums = tuple[Arriving, int]
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

    def add(self, sums: Arriving, pairs: int) -> None:
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
