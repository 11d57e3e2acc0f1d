"""A part of a model on the worker's device: what torch has divided is there already, the rest is moved here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def place(module: nn.Module, device: torch.device) -> None:
    """Moves the tensors of a module that are elsewhere, in place, one by one.

    Parameters stay the objects that they are, so that tied ones stay tied and an optimizer keeps its own.

    Args:
        module: a divided model, no part of it on the meta device.
        device: of this worker.
    """
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and _is_elsewhere(parameter, device):
                parameter.data = parameter.data.to(device)
        for name, buffer in part._buffers.items():
            if buffer is not None and _is_elsewhere(buffer, device):
                part._buffers[name] = buffer.to(device)


def _is_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    return not isinstance(tensor, DTensor) and tensor.device != device
