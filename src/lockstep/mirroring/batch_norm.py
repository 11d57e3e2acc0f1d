"""Batch norm over the whole global batch: its statistics are summed over all replicas.

Unsynchronised, each replica normalises by its own shard, and N replicas differ from one device by definition. With
``strategy.mirror(module, sync_batchnorm=True)`` they do not: mean and variance come from sums and counts over all
replicas (Ioffe and Szegedy 2015; the variance in a second pass over the centred values, which does not cancel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.replicas.context import get_replica_context


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of the global batch; outside a replica, plain batch norm.

    In training every replica must call it, those with an empty shard too. Input [N, C, ...].
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm got an input of {input.dim()} dimensions; expected at least 2: [N, C, ...]")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        context = get_replica_context()
        if context is None or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # Half precision holds neither sums nor counts; torch's own batch norm adds in float32 too.
        exact = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        # One meeting for the sum and the count, another for the centred squares; both are differentiable.
        sums = exact.sum(dims)
        rows = sums.new_full((1,), input.numel() / input.shape[1])
        total = context.all_reduce("sum", torch.cat([sums, rows]))
        seen = float(total[-1].detach())
        count = max(1.0, seen)
        mean = total[:-1] / count
        centred = exact - mean.view(shape)
        squares = context.all_reduce("sum", centred.square().sum(dims))
        variance = squares / count
        if seen:
            self._track(mean.detach(), squares.detach(), count)
        output: torch.Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, squares: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((squares / max(count - 1, 1)).to(self.running_var.dtype), momentum)


def convert_sync_batch_norm(module: nn.Module) -> nn.Module:
    """Replaces every batch norm inside ``module`` by a ``SyncBatchNorm`` with the same parameters and buffers.

    In place but for ``module`` itself, which is returned, replaced if it is a batch norm. Keys stay the same.
    """
    for name, child in list(module.named_children()):
        setattr(module, name, convert_sync_batch_norm(child))
    if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
        return module
    synced = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    state: dict[str, Any] = module.__dict__
    synced.__dict__.update(state)
    return synced


def has_sync_batch_norm(module: nn.Module) -> bool:
    """Whether running ``module`` in training is a collective."""
    return any(isinstance(part, SyncBatchNorm) for part in module.modules())
