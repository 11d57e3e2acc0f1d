"""Whether values that were read are of the kinds that they were saved as. Pure.

A record may be whole JSON and still hold a text where a number belongs. Python would take it, and fail somewhere in the
training with an error that names neither the checkpoint nor the value. So the kinds are looked at before anything is
loaded, and a checkpoint with another kind is damaged like one with a broken file.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from lockstep.checkpoint.nested import Stored
from lockstep.errors import CheckpointError


class DamagedStateError(CheckpointError):
    """A state holds something else than what was saved there: another checkpoint is to be taken."""


def check_kind(value: Any, kind: Any, place: str) -> None:
    """Looks whether ``value``, and all that is in it, is of a kind.

    Args:
        value: what was read.
        kind: a type as an annotation has it: ``int``, ``float`` (which integers are too), ``str``, ``bool``, ``None``,
            ``Tensor`` (for which ``nested.Stored`` may stand), ``list[...]``, ``dict[..., ...]``, unions of them, a
            dict of kinds, whose keys the value must have, a list of one kind, that of all items, a dataclass, whose
            fields the value must have as keys, or ``Any``.
        place: of the value, for the message, such as "position.epoch".

    Raises:
        DamagedStateError: it is not; the message has the place.
    """
    if kind is Any or _is(value, kind):
        _check_inside(value, kind, place)
        return
    raise DamagedStateError(f"{place} is {_shown(value)} instead of {_named(kind)}")


def check_like(value: Any, like: Any, place: str) -> None:
    """Looks whether a value that was read can take the place of one that is in use.

    None may stand for a bool, a tensor for a number and the other way round, and any of them for None. In dicts only
    the keys that both have count. To be used for classes of torch: another's values may change in kind.

    Raises:
        DamagedStateError: they differ in kind, or in the length of a tuple.
    """
    check_kind(value, _kind_like(like), place)
    if isinstance(like, Mapping):
        for key in like.keys() & value.keys():
            check_like(value[key], like[key], f"{place}.{key}")
    elif isinstance(like, (list, tuple)):
        if len(value) != len(like) and (isinstance(like, tuple) or not value):
            raise DamagedStateError(f"{place} has {len(value)} values instead of {len(like)}")
        for number, (own, other) in enumerate(zip(value, like, strict=False)):
            check_like(own, other, f"{place}[{number}]")


def _kind_like(value: Any) -> Any:
    match value:
        case None:
            return bool | float | torch.Tensor | None
        case bool():
            return bool | None
        case numbers.Real():
            return float | torch.Tensor
        case torch.Tensor():
            return torch.Tensor | float if value.numel() == 1 else torch.Tensor
        case str():
            return str
        case Mapping():
            return dict
        case list() | tuple():
            return Sequence
    return Any


def _is(value: Any, kind: Any) -> bool:
    """Whether the value itself is of the kind; not what is in it."""
    if isinstance(kind, dict) or (is_dataclass(kind) and isinstance(kind, type)):
        return isinstance(value, Mapping)
    if isinstance(kind, list):
        return isinstance(value, list)
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(each is Any or _is(value, each) for each in get_args(kind))
    if origin in (None, NoneType):
        return value is None
    if origin in (int, float):
        return isinstance(value, numbers.Integral if origin is int else numbers.Real) and not isinstance(value, bool)
    if origin is torch.Tensor:
        return isinstance(value, (torch.Tensor, Stored))
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple))
    return isinstance(value, Mapping if origin is dict else origin)


def _check_inside(value: Any, kind: Any, place: str) -> None:
    if isinstance(kind, dict) or (isinstance(kind, type) and is_dataclass(kind)):
        for key, expected in _keys_of(kind).items():
            if key not in value:
                raise DamagedStateError(f"{place} lacks {key!r}")
            check_kind(value[key], expected, f"{place}.{key}")
        return
    if isinstance(kind, list):
        kind = list[kind[0]]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        _check_inside(value, next(each for each in args if each is Any or _is(value, each)), place)
    elif origin in (list, Sequence):
        for number, item in enumerate(value):
            check_kind(item, args[0], f"{place}[{number}]")
    elif origin is dict:
        for key, item in value.items():
            check_kind(key, args[0], f"{place}: the key {key!r}")
            check_kind(item, args[1], f"{place}.{key}")


def _keys_of(kind: Any) -> dict[str, Any]:
    if isinstance(kind, dict):
        return kind
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _shown(value: Any) -> str:
    if value is None or isinstance(value, (bool, numbers.Real)):
        return repr(value)
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"a {type(value).__name__}"


def _named(kind: Any) -> str:
    if isinstance(kind, dict) or (isinstance(kind, type) and is_dataclass(kind)):
        return "a dict"
    if isinstance(kind, list):
        return "a list"
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return " or ".join(_named(each) for each in get_args(kind))
    if origin in (None, NoneType):
        return "None"
    names = {int: "an integer", float: "a number", str: "a text", Sequence: "a list"}
    return names.get(origin, f"a {origin.__name__.lower()}")
