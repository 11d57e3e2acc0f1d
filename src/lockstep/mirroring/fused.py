"""Torch's fused optimizers, which a GPU can tell by itself to leave the weights alone.

    skip, 0.0 or 1.0, on the device --> optimizer.found_inf --> one kernel for many parameters: updated, or not touched

So whether the loss was finite, and whether anything was counted, never has to be read before an update. They are chosen
where the user has chosen neither ``fused`` nor ``foreach``; his own groups stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# Adagrad's kernel for CUDA was looked up in torch 2.13; the others have had theirs for long.
FUSED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW,
    *((torch.optim.Adagrad,) if torch.__version__ >= (2, 13) else ()),  # type: ignore[operator]
)  # fmt: skip


def why_not_fused(optimizer: Optimizer) -> str | None:
    """Why its fused kernels cannot be taken without being asked for; None where they can."""
    kind = type(optimizer)
    if kind not in FUSED:
        return f"torch has no fused {kind.__name__}"
    for group in optimizer.param_groups:
        if group.get("fused") is False or group.get("foreach") or group.get("differentiable"):
            return f"the {kind.__name__} was made with fused=False, foreach=True or differentiable=True"
        if group.get("momentum") and group.get("dampening"):
            return "with dampening, SGD's first update differs from the others, and it may be one that is skipped"
    return None


def fused_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group for a fused step."""
    return {**group, "fused": True}


def prepare_state(optimizer: Optimizer) -> None:
    """Makes the momentum of those that come to their first update.

    torch makes it in that update, and where the device skips that one it would stay what the memory held before. From
    zeros, without dampening, the first update has the same numbers.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def count_on_device(optimizer: Optimizer) -> None:
    """Moves the numbers of steps, which other kernels count on the host, to where fused ones count them."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = step.to(parameter.device, torch.float32)


class DenseGradients:
    """Watches for sparse gradients, which fused kernels do not take.

    Args:
        parameters: per parameter its copies, one per replica.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        self._unseen = list(parameters)
        self._sparse = False

    @property
    def all_dense(self) -> bool:
        """Whether no parameter has had a sparse gradient yet. Looks only at those that had none before."""
        if self._unseen:
            seen = [copies for copies in self._unseen if any(copy.grad is not None for copy in copies)]
            self._sparse |= any(copy.grad is not None and copy.grad.is_sparse for each in seen for copy in each)
            if seen:
                known = {id(copies) for copies in seen}
                self._unseen = [copies for copies in self._unseen if id(copies) not in known]
        return not self._sparse
