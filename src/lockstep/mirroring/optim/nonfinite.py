"""Losses that are NaN or infinite: the error, and the updates that are skipped because of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.gradients.exchange import Number


def check_finite(total: float) -> None:
    """Raises NonFiniteLossError for a loss that is NaN or infinite."""
    if not math.isfinite(total):
        raise NonFiniteLossError(
            f"the loss is {total}; the weights are those before this update. "
            "Lower the learning rate, clip the gradients (clip_norm=1.0), or look for bad values in the data"
        )


class Skips:
    """Decides which updates are skipped, on replica 0's device ``home``, without reading from it."""

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
        if self._bad is None:  # stays at one address, where captured steps find it; fused kernels read float32
            self._bad = torch.zeros((), dtype=torch.float32, device=self._home)
        if isinstance(total, Tensor):
            self._bad.copy_(torch.maximum(self._bad, (~torch.isfinite(total)).float()))
        return torch.maximum(self._bad, (count == 0).float()) if isinstance(count, Tensor) else self._bad.clone()
