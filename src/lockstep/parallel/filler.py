"""A row that adds nothing, for a pass that a replica without rows must make because others borrow its weights.

Models may not take batches without rows: a reshape to [0, -1, heads] has no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.parallel.arguments import Arguments

_MASK = "mask"


def call_without_rows(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``call`` gives for no rows: of one row of zeros, whose outputs are cut off again and have zero gradients.

    Args:
        call: the model.
        args: its arguments, whose tensors have no rows.
        kwargs: likewise. Where the name of an argument ends with "mask" the row is one of ones, which masks nothing.
    """
    forward = call.forward if isinstance(call, nn.Module) else call
    filled = list(with_one_row(Arguments(forward).named(args, {})).values())
    more = [_filled(value, False) for value in args[len(filled) :]]
    return tree_map(_cut, call(*filled, *more, **with_one_row(kwargs)))


def with_one_row(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without rows with a row, which is one of zeros; where a name ends with "mask", of ones."""
    return {name: _filled(value, name.endswith(_MASK)) for name, value in kwargs.items()}


def has_no_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first tensor among the arguments has none."""
    leaves = (leaf for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim)
    return next((not len(leaf) for leaf in leaves), False)


def _filled(value: Any, ones: bool) -> Any:
    return tree_map(lambda leaf: _row(leaf, ones or leaf.dtype is torch.bool) if _is_empty(leaf) else leaf, value)


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and not len(leaf)


def _row(leaf: Tensor, ones: bool) -> Tensor:
    return (leaf.new_ones if ones else leaf.new_zeros)((1, *leaf.shape[1:]))


def _cut(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 else leaf
