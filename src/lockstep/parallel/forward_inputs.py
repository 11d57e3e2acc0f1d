"""The arguments of a model's ``forward`` by name; and dummy batches, for a pass without rows.

A replica without rows must make a pass where others need its weights, and models may not take that: a reshape to
[0, -1, heads] fails. So it passes one row, which adds nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_leaves, tree_map
from lockstep.errors import DataError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ForwardArguments:
    """The parameters of a ``forward``."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters.values()
        self._positional = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
        self._keywords = frozenset(parameter.name for parameter in parameters if parameter.kind in _KEYWORD)
        named = [parameter for parameter in parameters if parameter.kind in (*_POSITIONAL, *_KEYWORD)]
        self.all = frozenset(parameter.name for parameter in named)
        self.required = frozenset(parameter.name for parameter in named if parameter.default is inspect.Parameter.empty)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, without positional ones beyond the named parameters."""
        return {**dict(zip(self._positional, args, strict=False)), **kwargs}

    def of_inputs(self, x: Any) -> dict[str, Any]:
        """The inputs of a batch by name: a dict, a tuple or list of positional ones, or a single one."""
        if isinstance(x, Mapping):
            named = {str(name): value for name, value in x.items()}
            unknown = sorted(named.keys() - self._keywords)
        else:
            args = x if isinstance(x, (tuple, list)) else (x,)
            named = self.named(args, {})
            unknown = [f"positional input {number + 1}" for number in range(len(named), len(args))]
        if unknown:
            raise DataError(
                f"the model's inputs have {', '.join(unknown)}, which its forward does not name; it takes "
                f"{', '.join(self._positional)}"
            )
        return named


def call_on_dummy_row(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a model on one row of zeros in place of no rows; the row is cut off its outputs, so gradients are zero.

    Where the name of an argument ends with "mask" the row is one of ones, which masks nothing.
    """
    forward = call.forward if isinstance(call, nn.Module) else call
    names = [*ForwardArguments(forward).named(args, {}), *[""] * len(args)]
    filled = [_filled(name, value) for name, value in zip(names, args, strict=False)]
    outputs = call(*filled, **{name: _filled(name, value) for name, value in kwargs.items()})
    # A slice of no rows stays in the autograd graph, so this worker's backward pass runs, with gradients of zero, and
    # takes part in the exchanges that the other workers wait in.
    return tree_map(
        lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 else leaf, outputs
    )


def has_no_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first tensor among the arguments has no rows."""
    # Only the first tensor tells: later ones may be tables that have no rows in any batch.
    leaves = (leaf for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim)
    return next((not len(leaf) for leaf in leaves), False)


def _filled(name: str, value: Any) -> Any:
    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf):
            return leaf
        make = leaf.new_ones if name.endswith("mask") or leaf.dtype is torch.bool else leaf.new_zeros
        return make((1, *leaf.shape[1:]))

    return tree_map(fill, value)
