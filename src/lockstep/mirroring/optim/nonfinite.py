"""Updates that a GPU skips without the host: those with a count of 0, and all from the first non-finite loss on.

    update k:    total finite?  count 0?  -> skip, 0.0 or 1.0, on the device -> the optimizer's kernels
    update k+2:  the host reads k's total -> NonFiniteLossError, with the weights of update k-1

The host reads nothing here and may be some updates ahead when it learns of a non-finite loss. So every later update is
skipped too, until ``reset_nonfinite``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.errors import NonFiniteLossError

Number = float | Tensor
"""A number that the host knows, or a tensor of one element that a device may still be computing."""


def check_finite(total: float) -> None:
    """Refuses a loss that is no number.

    Raises:
        NonFiniteLossError: it is NaN or infinite.
    """
    if not math.isfinite(total):
        raise NonFiniteLossError(
            f"the loss is {total}; the weights are those before this update. "
            "Lower the learning rate, clip the gradients (clip_norm=1.0), or look for bad values in the data"
        )


class Skips:
    """Decides for one optimizer's updates, in order.

    Args:
        home: the device on which it decides, replica 0's.
    """

    def __init__(self, home: torch.device) -> None:
        self._home = home
        self._bad: Tensor | None = None

    def reset_nonfinite(self) -> None:
        """Lets updates happen again."""
        if self._bad is not None:
            self._bad.zero_()

    def of(self, total: Number, count: Number) -> bool | Tensor:
        """Whether this update is skipped: a bool, or a float32 tensor of 0.0 or 1.0 that nobody has read."""
        if not isinstance(count, Tensor) and not count:
            return True
        if not isinstance(total, Tensor) and not isinstance(count, Tensor):
            return False
        if self._bad is None:  # kept at one address, where recorded steps find it
            self._bad = torch.zeros((), dtype=torch.float32, device=self._home)  # what fused kernels read
        if isinstance(total, Tensor):
            self._bad.copy_(torch.maximum(self._bad, _flag(~torch.isfinite(total))))
        return torch.maximum(self._bad, _flag(count == 0)) if isinstance(count, Tensor) else self._bad.clone()


def summed(values: list[Number], home: torch.device | None) -> Number:
    """The sum in double precision, in the order given.

    Args:
        values: one per replica.
        home: where tensors are added up; None reads them.
    """
    if home is None:
        return sum(float(value) for value in values)
    total: Number = 0.0
    for value in values:
        moved = value.to(home, torch.float64, non_blocking=True) if isinstance(value, Tensor) else value
        total = moved if isinstance(total, float) and not total else total + moved
    return total


def divisor(count: Number) -> Number:
    """What gradients are divided by: the count, and 1 where an update without one is skipped on the device."""
    # Not torch.where: its number would be copied to the device, for which the host waits.
    return count.masked_fill(count == 0, 1.0) if isinstance(count, Tensor) else count


def on_device(skip: bool | Tensor) -> Tensor | None:
    """What the device is to decide by; None where the host has decided."""
    return skip if isinstance(skip, Tensor) else None


def skipped_too(skip: Tensor, found_inf: Tensor) -> Tensor:
    """``skip`` or what a gradient scaler has found, which may be above 1 where several devices have found it."""
    return torch.maximum(skip, found_inf.to(skip.device, non_blocking=True).clamp(max=1.0))


def _flag(condition: Tensor) -> Tensor:
    return condition.to(torch.float32)
