"""The items of a data set as the steps see them: ``(x, y)`` or ``(x, y, sample_weight)``, and how x reaches the module.

Pure functions on one replica's shard. Dividing a global batch among replicas is ``lockstep.data``'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep._torch_compat import tree_flatten, tree_leaves, tree_map, tree_unflatten
from lockstep.data.structure import RowList, RowTuple, is_sequence
from lockstep.errors import DataError
from lockstep.replicas.context import ReplicaContext


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


@dataclass(frozen=True, slots=True)
class ShardRows:
    """What a loss or a metric looks at.

    Args:
        outputs: the module's.
        batch: with the targets and sample weights.
        rows: how many there are.
    """

    outputs: Any
    batch: LabelledBatch
    rows: int

    def index(self) -> Tensor | None:
        """The numbers of all rows, on their device; None where no tensor has rows."""
        leaves = self._leaves()[0]
        device = next((leaf.device for leaf in leaves if self._is_divided(leaf)), None)
        return None if device is None else torch.arange(self.rows, device=device)

    def take(self, index: Tensor) -> ShardRows:
        """The rows of these numbers. What has no rows stays whole."""
        leaves, structure = self._leaves()
        taken = [self._taken(leaf, index) for leaf in leaves]
        outputs, y, weight = tree_unflatten(taken, structure)
        return ShardRows(outputs, LabelledBatch(None, y, weight), index.numel())

    def tracked(self) -> ShardRows:
        """The same with outputs that gradients can be computed of."""

        def leaf_of(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.detach().requires_grad_() if floating else leaf

        return ShardRows(tree_map(leaf_of, self.outputs), self.batch, self.rows)

    def hides(self) -> bool:
        """Whether the outputs hold what has no rows: a number that the module computed, a cache."""
        plain = (int, float, str, type(None))
        return any(not self._is_divided(leaf) and not isinstance(leaf, plain) for leaf in tree_leaves(self.outputs))

    def without_hidden(self) -> ShardRows:
        """The same with something else in place of what has no rows."""

        def other(leaf: Any) -> Any:
            if self._is_divided(leaf):
                return leaf
            return leaf * 2 + 1 if isinstance(leaf, Tensor) and leaf.is_floating_point() else None

        return ShardRows(tree_map(other, self.outputs), self.batch, self.rows)

    def _leaves(self) -> tuple[list[Any], Any]:
        """Lists of one item a row are leaves."""
        arguments = (self.outputs, self.batch.y, self.batch.sample_weight)
        return tree_flatten(arguments, is_leaf=lambda node: isinstance(node, (RowList, RowTuple)))

    def _taken(self, leaf: Any, index: Tensor) -> Any:
        if isinstance(leaf, (RowList, RowTuple)) and len(leaf) == self.rows:
            return type(leaf)([leaf[row] for row in index.tolist()])
        return leaf[index] if self._is_divided(leaf) else leaf

    def _is_divided(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows


@contextmanager
def preserving_rng(context: ReplicaContext) -> Iterator[None]:
    """Afterwards the replica draws what it would have drawn without the block."""
    device = context.device.torch_device
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        yield
