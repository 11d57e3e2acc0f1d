"""Walking the nested structure of a batch, with a name for every leaf.

Tuples, lists, named tuples and mappings are structure; everything else is a leaf, and so are lists and tuples with one
item a row (``RowList``, ``RowTuple``; ``layout`` makes them). A mapping of any type, such as transformers'
``BatchEncoding``, comes out as a plain dict, which ``Strategy.run`` looks into. A leaf's name is for messages:
``x["input_ids"]``, ``y``, ``batch[4]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import register_pytree_node

T = TypeVar("T")

# What an item of data means to Model: (x, y) or (x, y, sample_weight).
_ITEM_NAMES = ("x", "y", "sample_weight")


class RowList(list[T]):
    """A list that has one item a row."""


class RowTuple(tuple[T, ...]):
    """A tuple that has one item a row."""


for _kind in (RowList, RowTuple):
    # So that tree_map in a step goes into them as into the lists and tuples that one device gets.
    register_pytree_node(_kind, lambda node: (list(node), type(node)), lambda children, kind: kind(children))


def map_leaves(fn: Callable[[str, Any], Any], batch: Any) -> Any:
    """The same structure with every leaf replaced by ``fn(name, leaf)``; called in the order of ``named_leaves``."""
    return _map(fn, batch, root_children(batch), "batch")


def named_leaves(batch: Any) -> list[tuple[str, Any]]:
    """All leaves with their names, in order."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda name, leaf: found.append((name, leaf)), batch)
    return found


def root_children(batch: Any) -> list[tuple[str, Any]] | None:
    """``children`` of a batch as a whole: the items of a pair or triple are called x, y and sample_weight."""
    if is_sequence(batch) and 2 <= len(batch) <= len(_ITEM_NAMES):
        return list(zip(_ITEM_NAMES, batch, strict=False))
    return children(batch, "batch")


def children(node: Any, name: str) -> list[tuple[str, Any]] | None:
    """What a node holds, each with its name; None for a leaf."""
    if isinstance(node, Mapping):
        return [(f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]", node[key]) for key in node]
    if fields := _fields(node):
        return [(f"{name}.{field}", child) for field, child in zip(fields, node, strict=True)]
    return [(f"{name}[{index}]", child) for index, child in enumerate(node)] if is_sequence(node) else None


def rebuilt(node: Any, kept: Iterable[Any]) -> Any:
    """A node like this one, of other children in the same order."""
    if isinstance(node, Mapping):
        return dict(zip(node, kept, strict=True))
    if isinstance(node, list):
        return list(kept)
    return type(node)(*kept) if _fields(node) else tuple(kept)


def is_sequence(node: Any) -> bool:
    """Whether a node is a list or a tuple whose items have no names, and which is not known to have one item a row."""
    return isinstance(node, (tuple, list)) and not isinstance(node, (RowList, RowTuple)) and not _is_named(node)


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and bool(getattr(node, "_fields", ()))


def _map(fn: Callable[[str, Any], Any], node: Any, below: list[tuple[str, Any]] | None, name: str) -> Any:
    if below is None:
        return fn(name, node)

    def mapped() -> Iterator[Any]:
        for child_name, child in below:
            yield _map(fn, child, children(child, child_name), child_name)

    return rebuilt(node, mapped())


def _fields(node: Any) -> tuple[str, ...]:
    """The fields of a named tuple; none for anything else. A packed sequence is a tensor of another shape."""
    if not isinstance(node, tuple) or isinstance(node, PackedSequence):
        return ()
    return getattr(node, "_fields", ())
