"""A shard of 0 rows passes through a module without poisoning its batch-norm statistics.

Over no values a mean is NaN, and batch norm would write it into its running statistics for good. While a replica runs
its copy on an empty shard, batch norm in training normalises by the running statistics and leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def guard_empty_shard(module: nn.Module, args: Iterable[Any], kwargs: dict[str, Any]) -> AbstractContextManager[object]:
    """What to run ``module`` in: nothing special, or the guard if its inputs have 0 rows and it has batch norms."""
    leaves = tree_leaves((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    empty = bool(tensors) and all(tensor.shape[0] == 0 for tensor in tensors)
    if empty and any(isinstance(part, _BatchNorm) for part in module.modules()):
        return _NoStatisticsOfNothing()
    return nullcontext()


class _NoStatisticsOfNothing(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return _batch_norm_of_nothing(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm_of_nothing(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if input.shape[0] or not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    shape = (1, -1) + (1,) * (input.ndim - 2)
    if weight is not None:
        input = input * weight.view(shape)
    return input if bias is None else input + bias.view(shape)
