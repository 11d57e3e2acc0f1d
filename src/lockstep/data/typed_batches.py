"""Batches of types derived from dict, list and tuple, and of other mappings, on the way from the source to replicas.

    BatchEncoding {ids: [7, 5]}        TypedMapping {ids: PerReplica}          BatchEncoding {ids: [4, 5]}
      its 7 encodings            ->      Attributes, PerReplica          ->      its 4 encodings

The type is called with a replica's items. What is among the attributes of a batch and does not follow from its items,
since the type called with all of them sets it otherwise or not at all, is set on what each replica gets.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep._torch_compat import register_pytree_node, tree_leaves
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.object_attributes import content_of, set_attribute
from lockstep.errors import DataError
from lockstep.introspection import is_kind

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_COMPARABLE = frozenset(["datetime", "decimal", "fractions", "pathlib", "uuid"])
"""Packages of plain values."""
_MAX_DEPTH = 12
_FAILURES = (TypeError, ValueError, KeyError, AttributeError, RuntimeError)


class Attributes:
    """The attributes of a batch that do not follow from its items, as one replica gets them.

    Args:
        kind: the name of the batch's type.
        values: the attributes, by name.
        by_row: those that are lists with one item a row, which are divided. Others go to every replica unchanged.
    """

    def __init__(self, kind: str, values: Mapping[str, Any], by_row: frozenset[str] = frozenset()) -> None:
        self.kind, self.values, self._by_row = kind, dict(values), by_row

    @classmethod
    def of(cls, node: Any, remade: Any) -> Attributes | None:
        """Returns the attributes of ``node`` that do not follow from its items; None if there are none.

        ``remade`` is another object of its type, made of the same items: it lacks them, or has other values.
        """
        copied_content = content_of(remade)
        values = {
            name: value
            for name, value in content_of(node).items()
            if not (name in copied_content and _alike(value, copied_content[name])) and not _is_cached(type(node), name)
        }
        by_row = frozenset(["_encodings"] if _is_encoding(node) else []) & values.keys()
        return cls(type(node).__name__, values, by_row) if values else None

    def part(self, start: int, size: int, rows: int | None = None) -> Attributes:
        """Those of ``size`` rows, from row ``start`` on, of a batch of ``rows``."""

        def divided(name: str, value: Any) -> Any:
            has_rows = name in self._by_row and isinstance(value, list) and rows in (None, len(value))
            return value[start : start + size] if has_rows else value

        values = {name: divided(name, value) for name, value in self.values.items()}
        return Attributes(self.kind, values, self._by_row)

    def mapped(self, fn: Callable[[Any], Any]) -> Attributes:
        """The same with ``fn(tensor)`` for every attribute that is a tensor."""
        values = {name: fn(value) if isinstance(value, Tensor) else value for name, value in self.values.items()}
        return Attributes(self.kind, values, self._by_row)

    def columns(self, rows: int) -> list[str]:
        """The names of tensors and arrays that are as long as the batch."""
        numpy = sys.modules.get("numpy")
        kinds = (Tensor, numpy.ndarray) if numpy else (Tensor,)
        return [name for name, value in self.values.items() if isinstance(value, kinds) and value.shape[:1] == (rows,)]

    def set_on(self, batch: Any) -> Any:
        """Returns ``batch``, which is of the same type, with these attributes."""
        for name, value in self.values.items():
            set_attribute(batch, name, value)
        return batch


def _is_encoding(node: Any) -> bool:
    module: Any = sys.modules.get("transformers.tokenization_utils_base")
    return module is not None and isinstance(node, module.BatchEncoding)


def _is_cached(kind: type, name: str) -> bool:
    """Whether an attribute was computed when it was first read, and so is that of all rows."""
    return any(isinstance(vars(base).get(name), cached_property) for base in kind.__mro__)


def _alike(value: Any, other: Any, depth: int = 0) -> bool:
    """Whether a constructor has made both of the same items; no comparison of a program's class runs."""
    if value is other:
        return True
    if type(value) is not type(other) or depth > _MAX_DEPTH:
        return False
    if type(value) in _ATOMS or type(value).__module__.partition(".")[0] in _COMPARABLE:
        return bool(value == other or (value != value and other != other))
    if isinstance(value, Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and _equal(value, other)
    if type(value).__name__ == "ndarray":
        return bool(value.shape == other.shape and value.tobytes() == other.tobytes())
    if type(value) is types.MethodType:
        return value.__func__ is other.__func__
    # Item by item, as the == of a class of the program may run any code, or return an array.
    parts, other_parts = _parts(value), _parts(other)
    if not parts and not isinstance(value, (dict, list, tuple, set, frozenset, types.FunctionType)):
        return any("__dict__" in vars(kind) for kind in type(value).__mro__)  # else it may hold anything, in C
    return parts.keys() == other_parts.keys() and all(_alike(parts[key], other_parts[key], depth + 1) for key in parts)


def _equal(value: Tensor, other: Tensor) -> bool:
    with contextlib.suppress(*_FAILURES):  # sparse and meta tensors
        return torch.equal(value, other) or bool(((value == other) | ((value != value) & (other != other))).all())
    return False


def _parts(value: Any) -> dict[Any, Any]:
    attributes = {("attribute", name): part for name, part in content_of(value).items()}
    if isinstance(value, dict):
        return {**attributes, **{("item", key): part for key, part in dict.items(value)}}
    if isinstance(value, (list, tuple)):
        return {**attributes, **{("item", key): part for key, part in enumerate(value)}}
    if type(value) in (set, frozenset):
        return {("item", part): part for part in value}
    return attributes


class TypedMapping(dict[Any, Any]):
    """Stands for a batch that is a mapping of another type than dict, on its way from the source to the replicas.

    Its values differ by replica. ``tree_map`` that selects one replica's values makes the mapping's own type of them,
    which may take no other values than tensors.
    """

    def __init__(self, items: Mapping[Any, Any], make: Callable[[dict[Any, Any]], Any], attributes: Any = None) -> None:
        super().__init__(items)
        self.make, self.attributes = make, attributes

    @classmethod
    def like(cls, node: Mapping[Any, Any], items: dict[Any, Any]) -> TypedMapping:
        """Raises a DataError if the type of ``node`` cannot be made of a dict."""
        if isinstance(node, TypedMapping):
            return cls(items, node.make, node.attributes)
        make = _mapping_maker(node)
        try:
            copy = make(dict(node))
            problem = "" if list(copy.keys()) == list(node.keys()) else f"has the keys {list(copy.keys())[:8]}"
        except _FAILURES as error:
            problem = f"raises {type(error).__name__}: {error}"
        if problem:
            raise _not_made(node, "a dict", problem)
        # The attributes of a TensorDict are how it keeps its items.
        return cls(items, make, Attributes.of(node, copy) if isinstance(make, (type, partial)) else None)


class TypedList(list[Any]):
    """The same of a list."""

    def __init__(self, items: Iterable[Any], make: Callable[[list[Any]], Any], attributes: Any = None) -> None:
        super().__init__(items)
        self.make, self.attributes = make, attributes


class TypedTuple(tuple[Any, ...]):
    """The same of a tuple; of a named tuple it has the fields too."""

    make: Callable[[list[Any]], Any]
    attributes: Any
    _fields: tuple[str, ...]


TYPED = (TypedMapping, TypedList, TypedTuple)


def is_typed_sequence(node: Any) -> bool:
    """Whether a node is of a class derived from list or tuple, and not a named tuple without other attributes."""
    kind = type(node)
    if kind in (list, tuple) or not isinstance(node, (list, tuple)) or isinstance(node, PackedSequence):
        return False
    return not (hasattr(kind, "_fields") and kind.__mro__[1] is tuple)


def typed_sequence(node: Any, items: Sequence[Any]) -> Any:
    """Items in place of those of a node for which ``is_typed_sequence`` is true.

    Raises a DataError if its type cannot be made of them.
    """
    if isinstance(node, TypedList):
        return TypedList(items, node.make, node.attributes)
    if isinstance(node, TypedTuple):
        return _typed_tuple(items, node.make, node.attributes, getattr(node, "_fields", None))
    kind, fields = type(node), getattr(node, "_fields", None)
    make = partial(_from_fields, kind) if fields else kind
    try:
        copy = make(list(node))
        problem = "" if len(copy) == len(node) else f"has {len(copy)} items"
    except _FAILURES as error:
        problem = f"raises {type(error).__name__}: {error}"
    if problem:
        raise _not_made(node, "its fields" if fields else "a list", problem)
    attributes = Attributes.of(node, copy)
    if isinstance(node, list):
        return TypedList(items, make, attributes)
    return _typed_tuple(items, make, attributes, fields)


def _from_fields(kind: Callable[..., Any], items: Iterable[Any]) -> Any:
    return kind(*items)


def _typed_tuple(items: Iterable[Any], make: Any, attributes: Any, fields: tuple[str, ...] | None) -> TypedTuple:
    node = TypedTuple(items)
    node.make, node.attributes = make, attributes
    if fields:
        node._fields = fields
    return node


def _not_made(node: Any, argument: str, problem: str) -> DataError:
    kind, plain = type(node).__qualname__, "list" if isinstance(node, list) else "tuple"
    plain = "dict" if isinstance(node, Mapping) else plain
    return DataError(
        f"a batch is a {kind}, of which each replica gets one made of its rows, and {kind}({argument}) {problem}; "
        f"give {plain}(batch), which the step then gets, or let the class take {argument} of its items"
    )


def _mapping_maker(node: Mapping[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    """What makes a mapping of the type of ``node`` of other values."""
    if isinstance(node, defaultdict):
        return partial(type(node), node.default_factory)
    tensordict: Any = sys.modules.get("tensordict")
    if tensordict is not None and isinstance(node, tensordict.TensorDictBase):
        dims: int = node.batch_dims
        return lambda items: tensordict.TensorDict(items, next(iter(items.values())).shape[:dims] if items else [])
    return type(node)


def is_attributes(leaf: Any) -> bool:
    """Whether a leaf of a structure holds attributes, also those of all replicas, and no data."""
    kind = type(leaf)  # as ``is_kind``, written out: every leaf of a step's arguments is asked in each run
    if issubclass(kind, PerReplica):
        return len(leaf) > 0 and issubclass(type(leaf[0]), Attributes)
    return issubclass(kind, Attributes)


def _children(values: Iterable[Any], attributes: Any) -> list[Any]:
    return [*values, *([] if attributes is None else [attributes])]


def _split(children: Iterable[Any], has_attributes: bool) -> tuple[list[Any], Any, bool]:
    """The items, the attributes, and whether any of them differs by replica."""
    values = list(children)
    differ = any(is_kind(leaf, PerReplica) for leaf in tree_leaves(values))
    attributes = values.pop() if has_attributes else None
    return values, attributes, differ


def _finished(batch: Any, attributes: Any) -> Any:
    return attributes.set_on(batch) if is_kind(attributes, Attributes) else batch


def _mapping_of(children: Iterable[Any], context: Any) -> Any:
    """The mapping's own type if these are one replica's values, and else what they were taken from."""
    keys, make, has_attributes = context
    values, attributes, differ = _split(children, has_attributes)
    items = dict(zip(keys, values, strict=True))
    return TypedMapping(items, make, attributes) if differ else _finished(make(items), attributes)


def _list_of(children: Iterable[Any], context: Any) -> Any:
    make, has_attributes = context
    values, attributes, differ = _split(children, has_attributes)
    return TypedList(values, make, attributes) if differ else _finished(make(values), attributes)


def _tuple_of(children: Iterable[Any], context: Any) -> Any:
    make, has_attributes, fields = context
    values, attributes, differ = _split(children, has_attributes)
    return _typed_tuple(values, make, attributes, fields) if differ else _finished(make(values), attributes)


register_pytree_node(
    TypedMapping,
    lambda node: (_children(node.values(), node.attributes), (tuple(node), node.make, node.attributes is not None)),
    _mapping_of,
)
register_pytree_node(
    TypedList,
    lambda node: (_children(node, node.attributes), (node.make, node.attributes is not None)),
    _list_of,
)
register_pytree_node(
    TypedTuple,
    lambda node: (
        _children(node, node.attributes),
        (node.make, node.attributes is not None, getattr(node, "_fields", None)),
    ),
    _tuple_of,
)
