"""Walks the nested structure of a batch, with a name for every leaf, and takes rows of leaves.

Tuples, lists, named tuples and mappings are structure; everything else is a leaf, and so are lists and tuples with one
item a row (``RowList``, ``RowTuple``; ``batch_lists`` makes them) and values of examples of different sizes, such as
packed sequences (``ragged``). A batch of a type derived from these, and a mapping
of another type than dict, is of its own type in each replica's view (``typed_batches``). The names of leaves are for
messages: ``x["input_ids"]`` and ``y`` of a pair, ``batch[4]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep._torch_compat import is_leaf_kind, register_pytree_node, tree_leaves
from lockstep.collectives.per_replica import LEAVES, PartsOfExamples, PerReplica, select, value_of
from lockstep.data.ragged import part_of_ragged, rows_of_ragged
from lockstep.data.typed_batches import TYPED, TypedMapping, is_attributes, is_typed_sequence, typed_sequence
from lockstep.errors import DataError
from lockstep.introspection import is_kind

T = TypeVar("T")

# What an item of data means to Model: (x, y) or (x, y, sample_weight).
_ITEM_NAMES = ("x", "y", "sample_weight")


class RowList(list[T]):
    """A list with one item a row."""


class RowTuple(tuple[T, ...]):
    """A tuple with one item a row."""


_ROWS = (RowList, RowTuple)
_WHOLE = (*_ROWS, PackedSequence)
"""Structures to torch's pytree that are one leaf here."""
for _kind in _ROWS:
    # So that tree_map in a step goes into them as into the lists and tuples that one device gets.
    register_pytree_node(_kind, lambda node: (list(node), type(node)), lambda children, kind: kind(children))


def map_leaves(
    fn: Callable[[str, Any], Any],
    batch: Any,
    *,
    name: str | None = None,
    is_item: bool = False,
    attributes: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the same structure with ``fn(name, leaf)`` for every leaf, called in the order of ``named_leaves``.

    ``name`` is that of the structure, if it is not a whole batch. ``is_item`` says that a batch of three is
    (x, y, sample_weight), as a ``Model`` takes it; in other loops they may be anything. ``attributes`` is called with
    the ``Attributes`` of each batch object, or with None if it has none, and returns what takes their place.
    """

    def mapped(node: Any, name: str, below: list[tuple[str, Any]] | None) -> Any:
        if below is None:
            return fn(name, node)
        result = rebuilt(node, [mapped(child, child_name, children(child, child_name)) for child_name, child in below])
        if attributes is not None and isinstance(result, TYPED):
            result.attributes = attributes(result.attributes)
        return result

    return mapped(batch, name or "batch", children(batch, name) if name else root_children(batch, is_item=is_item))


def named_leaves(batch: Any, *, name: str | None = None, is_item: bool = False) -> list[tuple[str, Any]]:
    """Returns all leaves with their names, in order, as ``map_leaves``."""
    leaves: list[tuple[str, Any]] = []
    map_leaves(lambda name, leaf: leaves.append((name, leaf)), batch, name=name, is_item=is_item)
    return leaves


def root_children(batch: Any, *, is_item: bool) -> list[tuple[str, Any]] | None:
    """Returns the ``children`` of a whole batch. A pair is (x, y), and an item of a ``Model`` (x, y, sample_weight)."""
    if is_sequence(batch) and 2 <= len(batch) <= (len(_ITEM_NAMES) if is_item else 2):
        return list(zip(_ITEM_NAMES, batch, strict=False))
    return children(batch, "batch")


def children(node: Any, name: str) -> list[tuple[str, Any]] | None:
    """Returns the children of a node with their names; None for a leaf."""
    if isinstance(node, Mapping):
        keys = list(node.keys())  # the iterator of a TensorDict is over its rows
        return [(f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]", node[key]) for key in keys]
    if fields := _fields(node):
        return [(f"{name}.{field}", child) for field, child in zip(fields, node, strict=True)]
    return [(f"{name}[{index}]", child) for index, child in enumerate(node)] if is_sequence(node) else None


def rebuilt(node: Any, parts: Iterable[Any]) -> Any:
    """Returns a node like this one with other children, in the same order."""
    if isinstance(node, Mapping):
        items = dict(zip(node.keys(), parts, strict=True))
        plain = type(node) in (dict, MappingProxyType)
        return items if plain else TypedMapping.like(node, items)
    if is_typed_sequence(node):
        return typed_sequence(node, list(parts))
    if isinstance(node, list):
        return list(parts)
    return type(node)(*parts) if _fields(node) else tuple(parts)


def is_sequence(node: Any) -> bool:
    """Whether a node is a list or tuple other than a named tuple, not marked as having one item a row."""
    return isinstance(node, (tuple, list)) and not (isinstance(node, (RowList, RowTuple)) or hasattr(node, "_fields"))


def _fields(node: Any) -> tuple[str, ...]:
    """The fields of a named tuple, and none for anything else. A packed sequence is a leaf."""
    if not isinstance(node, tuple) or isinstance(node, PackedSequence):
        return ()
    return getattr(node, "_fields", ())


def rows_of(leaf: Any) -> int | None:
    """Returns the number of rows of a leaf, or None for a value without rows."""
    if issubclass(type(leaf), Tensor):
        return leaf.size(0) if leaf.ndim else None
    return len(leaf) if is_kind(leaf, (RowList, RowTuple)) else rows_of_ragged(leaf)


def first_rows(leaves: Iterable[Any]) -> int | None:
    """Returns the number of rows of the first leaf that has rows; None if none has."""
    for leaf in leaves:
        if (rows := rows_of(leaf)) is not None:
            return rows
    return None


def leaf_has_rows(leaf: Any) -> bool:
    """Whether a leaf has rows that can be divided."""
    return rows_of(leaf) is not None


def replica_leaves(view: Any) -> list[Any]:
    """Returns the leaves of a batch as a replica gets it. A list of rows is one leaf, a mapping of any type is none."""

    def inside(leaf: Any) -> list[Any]:
        if isinstance(leaf, Mapping):
            return replica_leaves(list(leaf.values()))
        if is_typed_sequence(leaf) and not isinstance(leaf, (RowList, RowTuple)):
            return replica_leaves(list(leaf))
        return [leaf]

    return [leaf for node in _leaves(view) for leaf in inside(node)]


class Shards:
    """What each of some replicas gets of the arguments of a run.

    Attributes:
        leaves: the leaves of each replica's arguments. Mappings are looked into where they come from distributed data,
            and not where they are objects of the program. Parts of flat tensors are not among them.
        examples: the number of examples of each replica, where the program has said how batches are divided by example.
        are_distributed: whether any argument has a value for each replica.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.leaves: list[list[Any]] = [[] for _ in range(replicas)]
        self.examples: Sequence[int] | None = None
        self.are_distributed = False

    def views(self, arguments: Any) -> list[Any]:
        """Returns each replica's view of a structure, and notes its leaves.

        Raises ConfigError for values of as many replicas as another strategy has.
        """
        kind = type(arguments)
        if kind is PerReplica:
            return self._values(arguments)
        if kind in LEAVES or (is_leaf_kind(kind) and not (issubclass(kind, PerReplica) or is_attributes(arguments))):
            self._note(arguments)
            return [arguments] * self._replicas
        if kind is tuple or kind is list:
            columns = [self.views(node) for node in arguments]
            return [kind(column) for column in zip(*columns, strict=True)] if columns else [kind()] * self._replicas
        if kind is dict:
            columns = [self.views(node) for node in arguments.values()]
            rows = zip(*columns, strict=True) if columns else [()] * self._replicas
            return [dict(zip(arguments, row, strict=True)) for row in rows]
        for leaf in _leaves(arguments):
            if is_kind(leaf, PerReplica):
                self._values(leaf)
            else:
                self._note(leaf)
        return [select(arguments, replica, self._replicas) for replica in range(self._replicas)]

    def _values(self, values: PerReplica[Any]) -> list[Any]:
        self.are_distributed = True
        views = [value_of(values, replica, self._replicas) for replica in range(self._replicas)]
        if isinstance(values, PartsOfExamples):
            self.examples = values.examples
            return views
        for leaves, value in zip(self.leaves, views, strict=True):
            if type(value) is Tensor:
                leaves.append(value)
            else:
                leaves += _leaves(value)
        return views

    def rows(self) -> list[int | None]:
        """The number of rows, or of examples, of each replica's arguments; None if nothing in them has rows."""
        return list(map(first_rows, self.leaves)) if self.examples is None else list(self.examples)

    def _note(self, leaf: Any) -> None:
        for leaves in self.leaves:
            leaves.append(leaf)


def distributed_leaves(arguments: Any, replicas: int) -> list[list[Any]]:
    """Returns the leaves of those arguments that have rows, or a value, for each local replica, by replica."""
    leaves = _leaves(arguments)
    distributed = [leaf for leaf in leaves if is_kind(leaf, PerReplica) and not is_kind(leaf, PartsOfExamples)]
    return [[leaf for value in distributed for leaf in _leaves(value[replica])] for replica in range(replicas)]


def _leaves(structure: Any) -> list[Any]:
    """The leaves without attributes of batches; a list with one item a row is one leaf."""
    kind = type(structure)
    if kind in LEAVES:
        return [structure]
    if kind is tuple or kind is list or kind is dict:
        nodes = structure.values() if kind is dict else structure
        return [leaf for node in nodes for leaf in ((node,) if type(node) in LEAVES else _leaves(node))]
    leaves = tree_leaves(structure, is_leaf=lambda node: issubclass(type(node), _WHOLE))
    return [leaf for leaf in leaves if not is_attributes(leaf)]


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a strided tensor, of which views can be taken."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def check_layout(name: str, leaf: Tensor) -> None:
    """Raises a DataError for a tensor of which no rows are taken: a sparse one."""
    if not is_plain(leaf) and not leaf.is_nested:
        raise DataError(
            f"{name} is a tensor of layout {leaf.layout}, which cannot be divided; give it dense, as an index with "
            "values (edge_index), or as a list of one for each row"
        )


def take_rows(leaf: Any, start: int, size: int, *, copies: bool = False) -> Any:
    """Returns ``size`` rows of a leaf that has rows, from row ``start`` on: views of a tensor, or copies."""
    if isinstance(leaf, (RowList, RowTuple)):
        return type(leaf)(leaf[start : start + size])
    if not is_plain(leaf):
        part = leaf if size == rows_of(leaf) else part_of_ragged(leaf, start, size)
        return part.clone() if copies and isinstance(part, Tensor) else part
    rows = leaf if size == leaf.size(0) else leaf.narrow(0, start, size)
    if copies:
        rows = rows.clone(memory_format=torch.contiguous_format)
    # A step may change its shard in place. To autograd, a change of a view is a change of the whole batch, and so of
    # what the other replicas have saved for their backward passes.
    return rows if leaf.requires_grad else rows.data
