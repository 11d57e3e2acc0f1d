"""The loss of a pass so far: sums and counts, divided only when they are read."""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import DataError


class RunningLoss:
    """The summed losses and counts of a pass."""

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self.total = total
        self.count = count

    def add(self, total: Tensor | float, count: Tensor | float) -> None:
        """Adds sums of one replica's step, or of one update of all replicas."""
        self.total += float(total)
        self.count += float(count)

    @property
    def value(self) -> float:
        """Summed total / summed count: the mean over all that was counted; NaN while nothing was."""
        return self.total / self.count if self.count else float("nan")

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
