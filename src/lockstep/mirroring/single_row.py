"""A shard of one row, or of none, passes through a module's batch norms.

torch's batch norm refuses a training batch with a single value per channel, which has no variance. On one device the
last rows of the data are together; divided among replicas one of them may be alone. It is normalised by the running
statistics then and leaves them alone; so does, in torch itself, a shard without rows.
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


def guard_single_row(module: nn.Module, args: Iterable[Any], kwargs: dict[str, Any]) -> AbstractContextManager[object]:
    """What to run ``module`` in: nothing special, or the guard if its inputs have one row and it has batch norms."""
    leaves = tree_leaves((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    single = bool(tensors) and all(tensor.size(0) == 1 for tensor in tensors)
    if single and any(isinstance(part, _BatchNorm) for part in module.modules()):
        return _NoStatisticsOfOneValue()
    return nullcontext()


class _NoStatisticsOfOneValue(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return _batch_norm_of_one_value(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm_of_one_value(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    training = training and (running_mean is None or input.numel() > input.shape[1])
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
