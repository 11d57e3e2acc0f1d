"""The steps that a device may still be computing: how far the loop runs ahead of it, and what it learns late.

    loop:    step k | step k+1 | step k+2 | what k has told is read: it has arrived, or is waited for
    device:  ........ step k   | step k+1 | ...

With two steps queued the device never stands idle for the host's sake. Further ahead nothing would be won, and the
batches would fill the device's memory. On a CPU a step is done when it returns, and nothing here is ever late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.skipping import check_finite
from lockstep.replicas.device.async_scalars import Arriving

MOST_AHEAD = 2
"""Steps after one whose numbers have not been read."""


class _Step(NamedTuple):
    numbers: Arriving
    epoch: int
    step: int


class StepsUnderWay:
    """The last steps of a pass, at most two of which have not been heard of."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, numbers: Arriving, *, epoch: int, step: int) -> None:
        """Notes a step, and reads those that have arrived, or that are too far behind.

        Args:
            numbers: the last is the total of its update, or 0.
            epoch: from 0, for the error.
            step: of the epoch, from 1, for the error.

        Raises:
            NonFiniteLossError: the total of an update of one of the last three steps is NaN or infinite; the weights
                are those before that update.
        """
        self._steps.append(_Step(numbers, epoch, step))
        while self._steps and (len(self._steps) > MOST_AHEAD or self._steps[0].numbers.arrived):
            self._hear()

    @property
    def any(self) -> bool:
        """Whether there are steps that have not been heard of."""
        return bool(self._steps)

    def settle(self) -> None:
        """Hears of all steps. Waits for the device.

        Raises:
            NonFiniteLossError: as ``add``.
        """
        while self._steps:
            self._hear()

    def _hear(self) -> None:
        told = self._steps.popleft()
        with located(told.epoch, told.step):
            check_finite(told.numbers.read()[-1])


@contextmanager
def located(epoch: int, step: int) -> Iterator[None]:
    """Says in which epoch, from 0, and which step of it, from 1, the loss was not finite."""
    try:
        yield
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"epoch {epoch + 1}, step {step}: {error}") from error
