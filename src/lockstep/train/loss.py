"""What ``loss(outputs, targets)`` returned, as a sum and a count: the pure step between a loss and the engine.

The engine back-propagates sums and divides once by the summed counts, before the update. That makes short shards, token
weights and gradient accumulation exact. Nothing here knows of replicas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError


def loss_sums(returned: Any, rows: int, sample_weight: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
    """Turns the result of a loss function into ``(total, count)``.

    Args:
        returned: per-example values of any shape whose first dimension is ``rows``; or a pair ``(total, count)``; or
            a scalar, taken as the mean over the examples.
        rows: the number of examples of this shard.
        sample_weight: of shape [rows], or one that broadcasts to the values. It multiplies the values; the count
            stays the number of values.

    Returns:
        ``total``, a scalar tensor in at least float32 that carries the gradient, and ``count``, a number or a scalar.

    Raises:
        ConfigError: another shape or type, or sample weights beside a loss that is already reduced.
    """
    if isinstance(returned, tuple):
        _reject_weight(sample_weight, "a pair (total, count)")
        return _pair(returned)
    if not isinstance(returned, Tensor):
        raise ConfigError(
            f"the loss returned {type(returned).__name__}; return a tensor with one value per example, "
            "a pair (total, count), or a scalar mean"
        )
    if returned.dim() == 0:
        _reject_weight(sample_weight, "a scalar mean")
        return _at_least_float32(returned) * rows, float(rows)
    if returned.shape[0] != rows:
        raise ConfigError(
            f"the loss returned shape {tuple(returned.shape)} for {rows} examples; return one value per example "
            f"(first dimension {rows}), a pair (total, count), or a scalar mean"
        )
    return _values(returned, sample_weight)


def no_examples(outputs: Tensor) -> tuple[Tensor, float]:
    """The sums of a shard without rows: a zero still connected to ``outputs``, so that backward runs through it."""
    return _at_least_float32(outputs).sum() * 0.0, 0.0


def _values(values: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, float]:
    exact = _at_least_float32(values)
    if sample_weight is not None:
        exact = exact * _fit_weight(sample_weight, values)
    return exact.sum(), float(values.numel())


def _pair(returned: tuple[Any, ...]) -> tuple[Tensor, Tensor | float]:
    if len(returned) != 2:
        raise ConfigError(f"the loss returned a tuple of {len(returned)} items; return a pair (total, count)")
    total, count = returned
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ConfigError(f"the loss returned a pair whose total is {shape}; return a scalar tensor, the sum")
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ConfigError(f"the loss returned a pair whose count has shape {tuple(count.shape)}; return one number")
        return _at_least_float32(total).reshape(()), count.detach().reshape(())
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise ConfigError(f"the loss returned a pair whose count is a {type(count).__name__}; return a number")
    return _at_least_float32(total).reshape(()), float(count)


def _fit_weight(weight: Tensor, values: Tensor) -> Tensor:
    """The weights with as many dimensions as the values: [rows] or [rows, 1] beside [rows, tokens], and so on."""
    shape = list(weight.shape)
    while len(shape) > values.dim() and shape[-1] == 1:
        shape.pop()
    shape += [1] * (values.dim() - len(shape))
    fits = len(shape) == values.dim() and all(a in (1, b) for a, b in zip(shape[1:], values.shape[1:], strict=True))
    if not fits or shape[0] != values.shape[0]:
        raise ConfigError(
            f"sample_weight has shape {tuple(weight.shape)} beside loss values of shape {tuple(values.shape)}; "
            f"give shape ({values.shape[0]},) or one that broadcasts to the values"
        )
    return weight.reshape(shape)


def _reject_weight(sample_weight: Tensor | None, what: str) -> None:
    if sample_weight is not None:
        raise ConfigError(
            f"sample_weight came with a loss that returns {what}, which cannot be weighted any more; "
            "return one value per example (such as reduction='none')"
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
