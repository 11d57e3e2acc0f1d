"""Walking the nested structure of a batch, with a name for every leaf.

Tuples, lists, named tuples and mappings are structure; everything else is a leaf. A mapping of any type, such as
transformers' ``BatchEncoding``, comes out as a plain dict, which ``Strategy.run`` looks into. A leaf's name is for
messages: ``x["input_ids"]``, ``y``, ``batch[4]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# What an item of data means to Model: (x, y) or (x, y, sample_weight).
_ITEM_NAMES = ("x", "y", "sample_weight")


def map_leaves(fn: Callable[[str, Any], Any], batch: Any) -> Any:
    """The same structure with every leaf replaced by ``fn(name, leaf)``; called in the order of ``named_leaves``."""
    return _map(fn, batch, _root_names(batch), "batch")


def named_leaves(batch: Any) -> list[tuple[str, Any]]:
    """All leaves with their names, in order."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda name, leaf: found.append((name, leaf)), batch)
    return found


def _map(fn: Callable[[str, Any], Any], node: Any, names: Iterator[str], name: str) -> Any:
    def below(child_name: str, child: Any) -> Any:
        return _map(fn, child, _child_names(child, child_name), child_name)

    if isinstance(node, Mapping):
        return {key: below(child_name, node[key]) for key, child_name in zip(node, names, strict=True)}
    if isinstance(node, (tuple, list)):
        children = [below(child_name, child) for child_name, child in zip(names, node, strict=True)]
        return _rebuild(node, children)
    return fn(name, node)


def _rebuild(node: tuple[Any, ...] | list[Any], children: list[Any]) -> Any:
    if isinstance(node, list):
        return children
    return type(node)(*children) if _fields(node) else tuple(children)


def _root_names(batch: Any) -> Iterator[str]:
    if isinstance(batch, (tuple, list)) and not _fields(batch) and 2 <= len(batch) <= len(_ITEM_NAMES):
        return iter(_ITEM_NAMES[: len(batch)])
    return _child_names(batch, "batch")


def _child_names(node: Any, name: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        return (f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]" for key in node)
    if fields := _fields(node):
        return (f"{name}.{field}" for field in fields)
    return (f"{name}[{index}]" for index in range(len(node))) if isinstance(node, (tuple, list)) else iter(())


def _fields(node: Any) -> tuple[str, ...]:
    """The fields of a named tuple; none for anything else."""
    return getattr(node, "_fields", ()) if isinstance(node, tuple) else ()
