"""Mixed precision inside a step: the autocast of the forward pass, and the gradient scaler that fp16 needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from lockstep.checkpoint.format import check_kind
from lockstep.replicas.context import ReplicaContext

PrecisionName = Literal["fp32", "bf16", "fp16"]

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MEAN_LOSS_SCALE = 65536.0


class Precision:
    """What ``compile(precision=...)`` means on one kind of device.

    Weights, gradients and the optimizer stay in the module's own dtype; autocast chooses the dtype of each operation.

    Args:
        name: "fp32", "bf16" or "fp16".
        device_type: "cpu" or "cuda".
    """

    def __init__(self, name: PrecisionName, device_type: str) -> None:
        self.name = name
        self._dtype = _AUTOCAST_DTYPES.get(name)
        self._needs_scaler = name == "fp16"
        self._device_type = device_type
        self.scaler: torch.amp.GradScaler | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward pass and loss; it is thread-local, so each replica enters its own."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def scale(self, context: ReplicaContext, count: torch.Tensor | float) -> torch.Tensor | None:
        """The factor for the loss before backward; None where there is none. The first call sums the counts.

        Every replica must call it.

        Args:
            context: the calling replica's.
            count: this replica's count of the step.

        Returns:
            The scaler's own tensor of one element in float32, on replica 0's device. It is not read: an update may
            still be changing it there.
        """
        if not self._needs_scaler:
            return None
        if self._scale is None:
            context.merge_call(lambda _strategy, counts: self._begin(context, counts), (count,))
        return self._scale

    @property
    def _scale(self) -> torch.Tensor | None:
        return None if self.scaler is None else self.scaler._get_scale_async()

    def state_dict(self) -> dict[str, Any]:
        """The gradient scaler's; empty before the first step and without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the scale that ``state_dict`` gave."""
        check_kind(state, dict[str, float], "the gradient scaler")
        self.scaler = torch.amp.GradScaler(self._device_type) if state else None
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state))

    def _begin(self, context: ReplicaContext, counts: Any) -> None:
        """Makes the scaler, if none was loaded, and its tensors, which it has from the first use on."""
        if self.scaler is None:
            self.scaler = self._make_scaler(context, counts)
        self.scaler.scale(torch.ones((), device=context.strategy.devices[0].torch_device))

    def _make_scaler(self, context: ReplicaContext, counts: Any) -> torch.amp.GradScaler:
        """A scaler that suits sums: torch's own default suits means, and sums are larger by the count.

        Without the division the first steps overflow and are skipped, one halving each.
        """
        count = max(float(context.strategy.reduce("sum", counts)), 1.0)
        scale = _MEAN_LOSS_SCALE / 2.0 ** math.ceil(math.log2(count))
        return torch.amp.GradScaler(self._device_type, init_scale=scale)
