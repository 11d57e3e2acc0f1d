"""Metrics of sums over rows, with what the rest of the package uses of torchmetrics' ``Metric``.

Importing torchmetrics takes almost as long as importing torch; a training with these metrics does not wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class SummedMetric(nn.Module, ABC):
    """Base of metrics that are computed from sums over rows, so their states are added up over replicas and batches.

    ``states`` are the names of the sums, int64 scalars of zero at first.
    """

    higher_is_better = True

    def __init__(self, *states: str) -> None:
        super().__init__()
        for name in states:
            self.register_buffer(name, torch.tensor(0), persistent=False)
        self._reductions = dict.fromkeys(states, _total)
        self._update_count = 0

    @abstractmethod
    def count(self, outputs: Any, targets: Any) -> None:
        """Adds the rows of a batch to the states, without gradients."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Returns the value of all that was counted, a scalar."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Adds the rows of a batch."""
        with torch.no_grad():
            self.count(outputs, targets)
        self._update_count += 1

    def reset(self) -> None:
        """Sets all sums to zero."""
        for name, state in self.metric_state.items():
            setattr(self, name, torch.zeros((), dtype=torch.int64, device=state.device))
        self._update_count = 0

    @property
    def metric_state(self) -> dict[str, Tensor]:
        return dict(self._buffers.items())  # type: ignore[arg-type]  # none is None

    @property
    def update_count(self) -> int:
        return self._update_count

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device


def _total(states: Tensor) -> Tensor:
    """The sum of a state's values on all replicas, [replicas, ...]."""
    return states.sum(0)
