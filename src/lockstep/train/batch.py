"""The items of a data set as the steps see them: ``(x, y)`` or ``(x, y, sample_weight)``, and how x reaches the module.

Pure functions on one replica's shard. Dividing a global batch among replicas is ``lockstep.data``'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.data.structure import is_sequence
from lockstep.errors import DataError


class LabelledBatch(NamedTuple):
    """One shard of labelled data: the module's inputs, the targets, and weights per example or None."""

    x: Any
    y: Any
    sample_weight: Tensor | None


def unpack_labelled(item: Any) -> LabelledBatch:
    """Splits an item of fit's or evaluate's data into inputs, targets and sample weights.

    Raises:
        DataError: the item is no pair or triple.
    """
    if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
        raise DataError(
            f"the data gave {_describe(item)}; fit and evaluate need items (x, y) or (x, y, sample_weight), "
            "where x may be a dict of the module's keyword arguments"
        )
    weight = item[2] if len(item) == 3 else None
    if weight is not None and not isinstance(weight, Tensor):
        raise DataError(f"the data gave a sample_weight of type {type(weight).__name__}; give a tensor of shape [rows]")
    return LabelledBatch(item[0], item[1], weight)


def unpack_inputs(item: Any) -> Any:
    """The inputs of an item of predict's data: the item itself, or the first of a tuple or list (x, y, ...).

    Raises:
        DataError: a tuple or list of another length.
    """
    if not isinstance(item, (tuple, list)):
        return item
    if len(item) not in (1, 2, 3):
        raise DataError(f"the data gave {_describe(item)}; predict needs x alone, (x, y) or (x, y, sample_weight)")
    return item[0]


def call_module(module: Callable[..., Any], x: Any) -> Any:
    """Calls the module: a dict is keyword arguments, a tuple or list positional ones, else x is the argument.

    A list of one item a row, such as images of many sizes, is one argument.
    """
    if isinstance(x, Mapping):
        return module(**x)
    if is_sequence(x):
        return module(*x)
    return module(x)


def _describe(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a dict with keys {sorted(map(str, item))}"
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)} items"
    if isinstance(item, Tensor):
        return f"a tensor of shape {tuple(item.shape)}"
    return f"a {type(item).__name__}"
