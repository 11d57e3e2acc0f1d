"""A shard's outputs and targets as rows, some of which can be taken: for what compares a shard with its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lockstep.data.structure import RowList, RowTuple
from lockstep.replicas.context import ReplicaContext
from lockstep.train.batch import LabelledBatch


@dataclass(frozen=True, slots=True)
class Rows:
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

    def take(self, index: Tensor) -> Rows:
        """The rows of these numbers. What has no rows stays whole."""
        leaves, structure = self._leaves()
        taken = [self._taken(leaf, index) for leaf in leaves]
        outputs, y, weight = tree_unflatten(taken, structure)
        return Rows(outputs, LabelledBatch(None, y, weight), index.numel())

    def tracked(self) -> Rows:
        """The same with outputs that gradients can be computed of."""

        def leaf_of(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.detach().requires_grad_() if floating else leaf

        return Rows(tree_map(leaf_of, self.outputs), self.batch, self.rows)

    def hides(self) -> bool:
        """Whether the outputs hold what has no rows: a number that the module computed, a cache."""
        plain = (int, float, str, type(None))
        return any(not self._is_divided(leaf) and not isinstance(leaf, plain) for leaf in tree_leaves(self.outputs))

    def without_hidden(self) -> Rows:
        """The same with something else in place of what has no rows."""

        def other(leaf: Any) -> Any:
            if self._is_divided(leaf):
                return leaf
            return leaf * 2 + 1 if isinstance(leaf, Tensor) and leaf.is_floating_point() else None

        return Rows(tree_map(other, self.outputs), self.batch, self.rows)

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
def random_numbers_apart(context: ReplicaContext) -> Iterator[None]:
    """Afterwards the replica draws what it would have drawn without the block."""
    device = context.device.torch_device
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        yield
