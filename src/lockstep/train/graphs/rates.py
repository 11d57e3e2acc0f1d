"""The optimizer's side of a recorded step: learning rates in tensors on the device, which schedules can change.

A schedule writes a float into the optimizer's groups. Inside a recorded step that float would stay what it was; so
while a step is recorded the groups hold tensors instead, and the floats are written there before each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from lockstep.mirroring.optimizer import MirroredOptimizer
from lockstep.train.graphs.unfit import UnfitError

FREE = ("lr",)
"""The hyperparameters that may change between replays."""


class DeviceRates:
    """The learning rates of an optimizer's groups as tensors of one element, in float32, which fused kernels read.

    Args:
        optimizer: the mirrored one.
        device: where its parameters are.

    Raises:
        UnfitError: an optimizer whose kernels take the rate as a number, or count steps on the host.
    """

    def __init__(self, optimizer: MirroredOptimizer, device: torch.device) -> None:
        if optimizer.not_fused is not None:
            raise UnfitError(f"the update is not made by fused kernels: {optimizer.not_fused}")
        if type(optimizer.plain) not in (SGD, Adam, AdamW):
            raise UnfitError(
                f"{type(optimizer.plain).__name__} takes its learning rate as a number; Adam, AdamW and SGD do not"
            )
        self._optimizer = optimizer
        self._taken: list[float | None] = [None] * len(optimizer.param_groups)
        self._tensors = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]

    def refresh(self) -> None:
        """Writes the present rates to the device, on the current stream, where they are others than before.

        Raises:
            UnfitError: the optimizer has got another group, or a rate that is a tensor.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._tensors) or any(isinstance(group["lr"], torch.Tensor) for group in groups):
            raise UnfitError(
                "the optimizer's groups hold learning rates that are tensors, or there are more than before"
            )
        for index, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if group["lr"] != self._taken[index]:
                self._taken[index] = group["lr"]
                tensor.fill_(group["lr"])

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside the block the groups hold the tensors, and say that their kernels can be recorded."""
        groups = self._optimizer.param_groups
        names = ("lr", "capturable")
        before: list[dict[str, Any]] = [{name: group[name] for name in names if name in group} for group in groups]
        try:
            for group, tensor in zip(groups, self._tensors, strict=True):
                group["lr"] = tensor
                if "capturable" in group:
                    group["capturable"] = True  # torch asks for it, though fused kernels count on the device anyway
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)
