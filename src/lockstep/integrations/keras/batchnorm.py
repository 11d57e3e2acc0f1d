"""Batch norms of Keras that take their statistics from the rows of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor

from lockstep.integrations.keras.losses import current_shard
from lockstep.replicas.context import ReplicaContext, get_replica_context


def synchronize_batchnorms(model: Any) -> None:
    """Has each batch norm of a model add up its moments over the replicas, in training."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            # object's own, as Keras tracks what is set on a layer.
            object.__setattr__(layer, "_moments", partial(_moments, layer, layer._moments))


def _moments(layer: Any, alone: Callable[..., Any], inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance over all axes but the layer's own, each of shape [channels]."""
    context, shard = get_replica_context(), current_shard.get()
    if context is None:
        return alone(inputs, mask)  # type: ignore[no-any-return]
    axes = tuple(layer._reduction_axes)
    weights = torch.ones((), dtype=inputs.dtype, device=inputs.device) if mask is None else mask[..., None]
    weights = weights.to(inputs.dtype).expand_as(inputs) * (shard is None or shard.rows > 0)
    size = _summed(context, weights, axes)
    mean = _summed(context, inputs * weights, axes) / size
    shape = [1 if axis in axes else length for axis, length in enumerate(inputs.shape)]
    # In two exchanges: the mean of the squares minus the square of the mean would lose the digits of a small variance
    # beside a large mean.
    variance = _summed(context, (inputs - mean.view(shape)).square() * weights, axes) / size
    return mean, variance


def _summed(context: ReplicaContext, values: Tensor, axes: tuple[int, ...]) -> Tensor:
    total: Tensor = context.all_reduce("sum", values.sum(dim=axes))
    return total
