"""The items of a data set as the steps see them: ``(x, y)`` or ``(x, y, sample_weight)``.

Pure functions on one replica's shard. ``lockstep.data`` divides the global batch among the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_flatten, tree_leaves, tree_map, tree_unflatten
from lockstep.data.structure import RowList, RowTuple, is_sequence
from lockstep.errors import DataError, UsageError
from lockstep.mirroring.gradients.local_sum import Number
from lockstep.replicas.context import ReplicaContext, get_replica_context, in_context
from lockstep.watch.row_dependence import rows_not_followed

Sums = tuple[Tensor, Number]
"""The losses of some rows: their total, a scalar that carries the gradient, and how many were counted."""


class LabelledBatch(NamedTuple):
    """One shard of labelled data: the module's inputs, the targets, and weights per example or None."""

    x: Any
    y: Any
    sample_weight: Tensor | None


def unpack_labelled(item: Any, *, by_module: bool = False) -> LabelledBatch:
    """Splits an item of fit's or evaluate's data, or raises a DataError.

    ``by_module`` says that the module computes the loss: then an item may be a dict with "labels", its targets.
    """
    if by_module and isinstance(item, Mapping) and "labels" in item:
        return LabelledBatch(item, item["labels"], None)
    if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
        dicts = ", or such dicts with 'labels', from which the module computes the loss" if by_module else ""
        raise DataError(
            f"the data gave {_describe(item)}; fit and evaluate need items (x, y) or (x, y, sample_weight), "
            f"where x may be a dict of the module's keyword arguments{dicts}"
        )
    weight = item[2] if len(item) == 3 else None
    if by_module and weight is not None:
        raise DataError(
            "sample_weight came with a loss that the module computes itself, which cannot be weighted any more; give "
            "compile a loss"
        )
    if weight is not None and not isinstance(weight, Tensor):
        raise DataError(f"the data gave a sample_weight of type {type(weight).__name__}; give a tensor of shape [rows]")
    return LabelledBatch(item[0], item[1], weight)


def unpack_inputs(item: Any) -> Any:
    """The inputs of an item of predict's data: the item itself, or the first of a tuple or list (x, y, ...)."""
    if not isinstance(item, (tuple, list)):
        return item
    if len(item) not in (1, 2, 3):
        raise DataError(f"the data gave {_describe(item)}; predict needs x alone, (x, y) or (x, y, sample_weight)")
    return item[0]


def module_arguments(x: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments that the module is called with: a dict gives keyword arguments, a tuple or list positional ones.

    Anything else is one argument, and so is a list of one item per row, such as images of different sizes.
    """
    if isinstance(x, Mapping):
        return (), x
    return (x if is_sequence(x) else (x,)), {}


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
    """The arguments of a loss or metric for the rows of a shard, of which some can be taken, to compare the results."""

    outputs: Any
    batch: LabelledBatch
    rows: int

    @property
    def leaves(self) -> Sequence[Any]:
        """Those of the outputs and the targets."""
        return tree_leaves((self.outputs, self.batch.y))

    def index(self) -> Tensor | None:
        """The numbers of all rows, on their device; None if no tensor has rows."""
        device = next((leaf.device for leaf in self._leaves()[0] if self._has_rows(leaf)), None)
        return None if device is None else torch.arange(self.rows, device=device)

    def take(self, index: Tensor) -> ShardRows:
        """The rows with these numbers. Leaves without rows stay whole."""
        leaves, structure = self._leaves()
        outputs, y, weight = tree_unflatten([self._take(leaf, index) for leaf in leaves], structure)
        return ShardRows(outputs, LabelledBatch(None, y, weight), index.numel())

    def requiring_grad(self) -> ShardRows:
        """Returns these rows with detached outputs that require gradients."""

        def changed(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.detach().requires_grad_() if floating else leaf

        return replace(self, outputs=tree_map(changed, self.outputs))

    def has_other_outputs(self) -> bool:
        """Whether the outputs hold tensors or objects without rows, such as a computed loss, or a cache."""
        plain = (int, float, str, type(None))
        return any(not self._has_rows(leaf) and not isinstance(leaf, plain) for leaf in tree_leaves(self.outputs))

    def with_other_outputs_changed(self) -> ShardRows:
        """Returns these rows with other values in the outputs that have no rows."""

        def changed(leaf: Any) -> Any:
            if self._has_rows(leaf):
                return leaf
            return leaf * 2 + 1 if isinstance(leaf, Tensor) and leaf.is_floating_point() else None

        return replace(self, outputs=tree_map(changed, self.outputs))

    def _leaves(self) -> tuple[list[Any], Any]:
        arguments = (self.outputs, self.batch.y, self.batch.sample_weight)
        return tree_flatten(arguments, is_leaf=lambda node: isinstance(node, (RowList, RowTuple)))

    def _take(self, leaf: Any, index: Tensor) -> Any:
        if isinstance(leaf, (RowList, RowTuple)) and len(leaf) == self.rows:
            return type(leaf)([leaf[row] for row in index.tolist()])
        return leaf[index] if self._has_rows(leaf) else leaf

    def _has_rows(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows


def replica_of_step() -> ReplicaContext:
    """The context of the replica that runs the step."""
    context = get_replica_context()
    if context is None:
        raise UsageError("a step was called outside a replica; call it through strategy.run")
    return context


@contextmanager
def checked_alone(context: ReplicaContext) -> Iterator[None]:
    """A block that computes a loss or metric of a replica once more, as if there were no other replicas."""
    # The comparison leaves no trace: the step after it has the random numbers that it would have had, and a collective
    # in the loss is an error instead of a wait for replicas that do not compare.
    with rows_not_followed(), preserving_rng(context), in_context(context.alone()):
        yield


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Restores training or evaluation mode after the block, submodule by submodule."""
    before = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part in module.modules():
            part.training = before.get(part, part.training)


@contextmanager
def preserving_rng(context: ReplicaContext) -> Iterator[None]:
    """Random numbers drawn in the block do not change those that the replica draws after it."""
    device = context.device.torch_device
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        yield
