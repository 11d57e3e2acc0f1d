"""What a mirrored module was like after its last run, as a value that one comparison tells from the present.

A snapshot has a shallow copy of each submodule's ``__dict__`` and of its dicts of weights, buffers, submodules and
hooks, so that one comparison in C finds what was set or removed. Comparing a module of 200 submodules takes 60 us. It
also describes the content of containers and objects in attributes. Nothing in a snapshot is changed: another one takes
its place. Tensors that are changed in place are the concern of ``watched_tensors``.
"""

from __future__ import annotations

import copyreg
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lockstep.introspection import attribute_of, attributes_of, is_kind, module_of
from lockstep.mirroring.module.watched_tensors import address_of, first_bytes, is_array, version_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""How torch is to call hooks: dicts with the keys of the dicts of hooks."""
_REGISTRIES = ("_parameters", "_buffers", "_modules", *HOOKS)
_OF_USER_ALONE = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    "_compiled_call_impl",
)
_NO_ATTRIBUTES = frozenset([*_REGISTRIES, *HOOK_FLAGS, *_OF_USER_ALONE])

_DEPTH = 4
"""How many containers and objects deep a change in place is seen."""
_MAX_CONTAINERS = 2_000  # are described at every run, which takes 2 us each
_MAX_ITEMS = 10_000
"""Larger containers are not looked into: comparing one would take more than 0.5 ms at every run."""

# By exact type: an instance of a subclass of int or str may have attributes that change.
ATOMS = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type, type(...), type(NotImplemented)),
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    ]
)
"""Types of which every replica has the same object: nothing in it can change."""
_THIS_PACKAGE = f"{__name__.partition('.')[0]}."
# Modules and tensors are compared by themselves; types and Python modules are the same object for all replicas.
_WITHOUT_CONTENT = (nn.Module, torch.Tensor, Optimizer, type, types.MethodType, types.ModuleType)
_CONTAINERS = (dict, list, deque, set, tuple)
_FLAT = frozenset(_CONTAINERS[:-1])
_ABSENT: Any = object()


class _IdentityOfTensors(TorchFunctionMode):
    """Inside the block two tensors that are not the same object are unequal, and no kernel runs to compare them."""

    # The comparison of two dicts calls == of their values. For two tensors that is a kernel, whose result has no truth
    # value unless it has one element.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False


class _Identity:
    """Equal to another one if both are of the same object, which is held weakly if that is possible."""

    def __init__(self, value: Any) -> None:
        try:
            self.of: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.of = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.of() is other.of()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A dict of one of the user's submodules, as it is now."""

    live: dict[str, Any]
    number: int  # of the submodule
    name: str  # of the dict, such as "_buffers"; "" is ``__dict__``


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """What a dict of the user's module has now and not in a snapshot."""

    node: Node
    removed: list[str]
    values: dict[str, Any]  # what was set, or changed in place
    in_place: frozenset[int]  # the ids of those that were there before
    restructures: bool  # it has another parameter or submodule, or another name of a buffer


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """The state of the user's module, the first of the copies.

    Attributes:
        parts: its submodules, and ``kinds`` their classes.
        tensor_ids: the ids of its weights and buffers.
        nodes: the dicts of its submodules, and ``live`` these dicts alone.
        former: a shallow copy of each of these dicts.
        attributes: those that can change in place: the number of a node, and a key in it.
        is_flat: of each attribute, whether it is a container of atoms, which is compared as it is.
        objects: the attributes that are not flat.
        content: of each attribute, a copy if it is flat, and else a description.
    """

    parts: Sequence[nn.Module]
    kinds: list[type]
    tensor_ids: frozenset[int]
    nodes: list[Node]
    live: list[dict[str, Any]]
    former: list[dict[str, Any]]
    attributes: list[tuple[int, str]]
    is_flat: list[bool]
    objects: list[tuple[int, str]]
    content: list[Any]

    @classmethod
    def of(cls, parts_of_copies: Sequence[Sequence[nn.Module]], tensor_ids: frozenset[int]) -> Snapshot:
        """The present state, given the submodules of each copy."""
        nodes: list[Node] = []
        for number, (part, *copies) in enumerate(zip(*parts_of_copies, strict=True)):
            # A mirrored metric is one object in all copies, and has its own replicas. By identity: == of two
            # TensorDictParams (tensordict 0.15), which torchrl's losses hold, is a TensorDict without a truth value.
            if any(part is duplicate for duplicate in copies):
                continue
            nodes += [Node(registry_of(part, name), number, name) for name in ("", *_REGISTRIES)]
        attributes = [
            (at, key)
            for at, node in enumerate(nodes)
            for key, value in (node.live.items() if not node.name else ())
            if type(value) not in ATOMS and key not in _NO_ATTRIBUTES and _can_change(value)
        ]
        live = [node.live for node in nodes]
        is_flat = [_is_flat(live[at][key]) for at, key in attributes]
        content = _content(live, attributes, is_flat, tensor_ids)
        return cls(
            parts=parts_of_copies[0],
            kinds=list(map(type, parts_of_copies[0])),
            tensor_ids=tensor_ids,
            nodes=nodes,
            live=live,
            former=list(map(dict, live)),
            attributes=attributes,
            is_flat=is_flat,
            objects=[attribute for attribute, flat in zip(attributes, is_flat, strict=True) if not flat],
            content=[value.copy() if type(value) in _FLAT else value for value in content],
        )

    def with_objects(self, *, present: bool) -> Snapshot:
        """The same with the present objects in attributes, or without any.

        Without, for the time of a run: it would keep tensors alive that the step drops, such as features.
        """
        former = list(self.former)
        for at, key in self.objects:
            if former[at] is self.former[at]:
                former[at] = former[at].copy()
            former[at][key] = self.live[at].get(key) if present else None
        return replace(self, former=former)

    def is_current(self) -> bool:
        """Whether nothing was set, removed or changed since, but for tensors of the registries."""
        content = self._present_content() if self.attributes else []
        with _IdentityOfTensors():
            same = _equal(self.live, self.former) and (not content or _equal(content, self.content))
        return same and list(map(type, self.parts)) == self.kinds

    def differences(self) -> list[Difference]:
        changed: dict[int, list[str]] = {}
        pairs = zip(self.content, self._present_content(), strict=True)
        with _IdentityOfTensors():
            for (at, key), (was, now) in zip(self.attributes, pairs, strict=True):
                if not _equal(now, was) and key in self.live[at]:
                    changed.setdefault(at, []).append(key)
            differing = [
                at
                for at, (live, former) in enumerate(zip(self.live, self.former, strict=True))
                if at in changed or not _equal([live], [former])
            ]
        return [self._difference(at, changed.get(at, ())) for at in differing]

    def _difference(self, at: int, changed: Sequence[str]) -> Difference:
        node, live, former = self.nodes[at], self.live[at], self.former[at]
        left_out = frozenset() if node.name else _NO_ATTRIBUTES
        keys = [key for key, value in live.items() if not _is_same(former.get(key, _ABSENT), value)]
        values = {key: live[key] for key in (*keys, *changed) if key not in left_out}
        same_names = node.name == "_buffers" and live.keys() == former.keys()
        return Difference(
            node=node,
            removed=[key for key in former if key not in live],
            values=values,
            in_place=frozenset(id(value) for key, value in values.items() if former.get(key) is value),
            restructures=node.name in ("_parameters", "_buffers", "_modules") and not same_names,
        )

    def _present_content(self) -> list[Any]:
        return _content(self.live, self.attributes, self.is_flat, self.tensor_ids)


def _content(
    live: Sequence[dict[str, Any]],
    attributes: Sequence[tuple[int, str]],
    is_flat: Sequence[bool],
    tensor_ids: frozenset[int],
) -> list[Any]:
    """The present content of the attributes that can change in place: containers of atoms, or descriptions."""
    descriptions: dict[int, Any] = {}
    contents = zip(is_flat, [live[at].get(key) for at, key in attributes], strict=True)
    return [value if flat else _describe(value, tensor_ids, descriptions, _DEPTH) for flat, value in contents]


def registry_of(part: nn.Module, name: str) -> dict[str, Any]:
    """A dict of a submodule by name; "" is ``__dict__``. A scripted module keeps its tensors in C++."""
    if isinstance(part, torch.jit.ScriptModule):
        if name == "_parameters":
            return dict(part.named_parameters(recurse=False))
        return dict(part.named_buffers(recurse=False)) if name == "_buffers" else {}
    registry: dict[str, Any] = part.__dict__[name] if name else part.__dict__
    return registry


def is_shared(value: Any) -> bool:
    """Whether a value that was set is the same object for all replicas: an atom, or an object of this package."""
    kind = type(value)
    return kind in ATOMS or (module_of(kind).startswith(_THIS_PACKAGE) and not is_kind(value, nn.Module))


def _describe(value: Any, tensor_ids: frozenset[int], descriptions: dict[int, Any], depth: int) -> Any:
    """What is equal as long as nothing has changed in a container, object, tensor or array."""
    if type(value) in ATOMS:
        return value
    description = descriptions.get(id(value))
    if description is not None:
        return description
    description = descriptions[id(value)] = [_Identity(value)]
    # A weak proxy answers for the object that it stands for, and raises once that is gone.
    if type(value) in weakref.ProxyTypes or id(value) in tensor_ids:
        return description
    if is_array(value):
        description += (address_of(value), version_of(value), first_bytes(value).raw)
        return description
    content = _content_of(value) if depth and len(descriptions) < _MAX_CONTAINERS else None
    if type(content) is set:
        description.append(set(content))
    elif type(content) is dict and len(content) <= _MAX_ITEMS:
        description.append({key: _describe(item, tensor_ids, descriptions, depth - 1) for key, item in content.items()})
    elif content is not None and len(content) <= _MAX_ITEMS:
        description.append([_describe(item, tensor_ids, descriptions, depth - 1) for item in content])
    return description


def _is_flat(value: Any) -> bool:
    """Whether it is a container of atoms, which is compared in C."""
    if type(value) not in _FLAT or len(value) > _MAX_ITEMS:
        return False
    return all(type(item) in ATOMS for item in (value.values() if type(value) is dict else value))


def _can_change(value: Any) -> bool:
    """Whether something in it can change in place that is looked at."""
    if type(value) is tuple:
        return not all(type(item) in ATOMS for item in value)
    return type(value) not in weakref.ProxyTypes and (is_array(value) or _content_of(value) is not None)


def _content_of(value: Any) -> Any:
    """The items or attributes of a value; None if it has none that are looked at, as this package's objects."""
    kind = type(value)
    for container in _CONTAINERS:
        if kind is container:
            return value
        # The base class's methods: those of a subclass may do anything, such as load a file or count a read.
        if issubclass(kind, container):
            return dict(dict.items(value)) if container is dict else list(container.__iter__(value))
    if is_kind(value, _WITHOUT_CONTENT) or module_of(kind).startswith(_THIS_PACKAGE):
        return None
    attributes, slots = attributes_of(value), copyreg._slotnames(kind)  # type: ignore[attr-defined]
    content = {name: attribute_of(value, name, _ABSENT) for name in slots}
    content = {name: slot for name, slot in content.items() if slot is not _ABSENT}
    return content | (attributes or {}) if content or attributes is not None else None


def _is_same(former: Any, value: Any) -> bool:
    return former is value or (type(former) is type(value) and type(value) in ATOMS and bool(former == value))


def _equal(live: Any, former: Any) -> bool:
    """Whether two structures have the same or equal elements; what cannot be compared is not equal.

    Python compares elements that are the same object by identity, and calls ``==`` only on those that were set anew.
    """
    try:
        return bool(live == former)
    except Exception:  # noqa: BLE001 - arrays cannot, and a comparison of the user's may raise anything
        return False
