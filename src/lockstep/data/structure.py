"""Walks the nested structure of a batch, with a name for every leaf, and takes rows of leaves.

Tuples, lists, named tuples and mappings are structure; everything else is a leaf, and so are lists and tuples with one
item a row (``RowList``, ``RowTuple``; ``layout`` makes them). A mapping of any type, such as transformers'
``BatchEncoding``, becomes a plain dict, which ``Strategy.run`` looks into. The names of leaves are for messages:
``x["input_ids"]``, ``y``, ``batch[4]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep._torch_compat import register_pytree_node, tree_leaves
from lockstep.errors import DataError
from lockstep.introspection import is_kind

T = TypeVar("T")

# What an item of data means to Model: (x, y) or (x, y, sample_weight).
_ITEM_NAMES = ("x", "y", "sample_weight")


class RowList(list[T]):
    """A list with one item a row."""


class RowTuple(tuple[T, ...]):
    """A tuple with one item a row."""


for _kind in (RowList, RowTuple):
    # So that tree_map in a step goes into them as into the lists and tuples that one device gets.
    register_pytree_node(_kind, lambda node: (list(node), type(node)), lambda children, kind: kind(children))


def map_leaves(fn: Callable[[str, Any], Any], batch: Any, *, name: str | None = None) -> Any:
    """Returns the same structure with ``fn(name, leaf)`` for every leaf, called in the order of ``named_leaves``.

    ``name`` is that of the structure, if it is not a whole batch.
    """

    def mapped(node: Any, name: str, below: list[tuple[str, Any]] | None) -> Any:
        if below is None:
            return fn(name, node)
        return rebuilt(node, [mapped(child, each, children(child, each)) for each, child in below])

    return mapped(batch, name or "batch", children(batch, name) if name else root_children(batch))


def named_leaves(batch: Any, *, name: str | None = None) -> list[tuple[str, Any]]:
    """Returns all leaves with their names, in order, as ``map_leaves``."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda name, leaf: found.append((name, leaf)), batch, name=name)
    return found


def root_children(batch: Any) -> list[tuple[str, Any]] | None:
    """Returns the ``children`` of a whole batch. The items of a pair or triple are called x, y and sample_weight."""
    if is_sequence(batch) and 2 <= len(batch) <= len(_ITEM_NAMES):
        return list(zip(_ITEM_NAMES, batch, strict=False))
    return children(batch, "batch")


def children(node: Any, name: str) -> list[tuple[str, Any]] | None:
    """Returns the children of a node with their names; None for a leaf."""
    if isinstance(node, Mapping):
        return [(f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]", node[key]) for key in node]
    if fields := _fields(node):
        return [(f"{name}.{field}", child) for field, child in zip(fields, node, strict=True)]
    return [(f"{name}[{index}]", child) for index, child in enumerate(node)] if is_sequence(node) else None


def rebuilt(node: Any, kept: Iterable[Any]) -> Any:
    """Returns a node like this one with other children, in the same order."""
    if isinstance(node, Mapping):
        return dict(zip(node, kept, strict=True))
    if isinstance(node, list):
        return list(kept)
    return type(node)(*kept) if _fields(node) else tuple(kept)


def is_sequence(node: Any) -> bool:
    """Whether a node is a list or tuple other than a named tuple, not marked as having one item a row."""
    return isinstance(node, (tuple, list)) and not (isinstance(node, (RowList, RowTuple)) or hasattr(node, "_fields"))


def _fields(node: Any) -> tuple[str, ...]:
    """The fields of a named tuple, and none for anything else. A packed sequence is a leaf, which is refused."""
    if not isinstance(node, tuple) or isinstance(node, PackedSequence):
        return ()
    return getattr(node, "_fields", ())


def rows_of(leaf: Any) -> int | None:
    """Returns the number of rows of a leaf, or None for a value without rows."""
    if is_kind(leaf, Tensor):
        return leaf.size(0) if leaf.ndim else None
    return len(leaf) if is_kind(leaf, (RowList, RowTuple)) else None


def leaf_has_rows(leaf: Any) -> bool:
    """Whether a leaf has rows that can be divided."""
    return rows_of(leaf) is not None


def replica_leaves(view: Any) -> list[Any]:
    """Returns the leaves of a replica's arguments. A list of rows is one leaf."""
    return tree_leaves(view, is_leaf=lambda node: is_kind(node, (RowList, RowTuple)))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a strided tensor, of which views can be taken."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def check_layout(name: str, leaf: Tensor) -> None:
    """Raises a DataError for a tensor of which no rows are taken: a sparse or nested one."""
    if not is_plain(leaf):
        kind = "nested" if leaf.is_nested else str(leaf.layout)
        raise DataError(f"{name} is a tensor of layout {kind}, which cannot be divided; give it dense, or padded")


def take_rows(leaf: Any, start: int, size: int, *, copies: bool = False) -> Any:
    """Returns ``size`` rows of a leaf that has rows, from row ``start`` on: views of a tensor, or copies."""
    if isinstance(leaf, (RowList, RowTuple)):
        return type(leaf)(leaf[start : start + size])
    rows = leaf.narrow(0, start, size)
    if copies:
        rows = rows.clone(memory_format=torch.contiguous_format)
    # A step may change its shard in place. To autograd, a change of a view is a change of the whole batch, and so of
    # what the other replicas have saved for their backward passes.
    return rows if leaf.requires_grad else rows.data
