"""A row that adds nothing, for a pass that a replica without rows must make because others borrow its weights.

Models may not take batches without rows: a reshape to [0, -1, heads] has no answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_leaves, tree_map
from lockstep.errors import DataError

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ForwardArguments:
    """What a ``forward`` takes.

    Args:
        forward: a function, or a bound method.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters.values()
        self._by_place = tuple(each.name for each in parameters if each.kind in _BY_PLACE)
        self._names = frozenset(each.name for each in parameters if each.kind in _BY_NAME)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that a call gives, by name; of more positional ones than there are names, those that have one.

        Example:
            >>> ForwardArguments(lambda x, mask=None: x).named([1], {"mask": 2})
            {'x': 1, 'mask': 2}
        """
        return {**dict(zip(self._by_place, args, strict=False)), **kwargs}

    def of_inputs(self, x: Any) -> dict[str, Any]:
        """The inputs of a batch by name: of a dict, of a tuple or list of positional ones, or of a single one.

        Raises:
            DataError: an input that has no parameter, or two for one.
        """
        if isinstance(x, Mapping):
            named = {str(name): value for name, value in x.items()}
            unknown = sorted(named.keys() - self._names)
        else:
            args = x if isinstance(x, (tuple, list)) else (x,)
            named = self.named(args, {})
            unknown = [f"positional input {number + 1}" for number in range(len(named), len(args))]
        if unknown:
            raise DataError(
                f"the model's inputs have {', '.join(unknown)}, which its forward does not name; it takes "
                f"{', '.join(self._by_place)}"
            )
        return named


_MASK = "mask"


def call_on_dummy_row(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``call`` gives for no rows: of one row of zeros, whose outputs are cut off again and have zero gradients.

    Args:
        call: the model.
        args: its arguments, whose tensors have no rows.
        kwargs: likewise. Where the name of an argument ends with "mask" the row is one of ones, which masks nothing.
    """
    forward = call.forward if isinstance(call, nn.Module) else call
    filled = list(with_dummy_row(ForwardArguments(forward).named(args, {})).values())
    more = [_filled(value, False) for value in args[len(filled) :]]
    return tree_map(_cut, call(*filled, *more, **with_dummy_row(kwargs)))


def with_dummy_row(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """ForwardArguments without rows with a row, which is one of zeros; where a name ends with "mask", of ones."""
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
