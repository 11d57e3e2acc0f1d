"""A snapshot of one submodule of the user's module: its attributes, the objects they refer to, weights and hooks.

    part.__dict__ --+-- "p": 0.5                      compared by value, in C
                    +-- "config": an object ---- its __dict__, compared too, and so on, to a depth of DEPTH
                    +-- _parameters, _buffers, _modules, hooks: dicts of their own

Snapshots are shallow copies, so one comparison of dicts finds what was set, replaced, removed or changed in place.
``propagation`` decides what a difference means.
"""

from __future__ import annotations

import ctypes
import enum
import os
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Which hooks of torch's are called in another way: dicts beside theirs, with the same keys."""
_LEFT = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    "_compiled_call_impl",
)
"""What only acts on the user's own module."""
OWN = (PARAMETERS, BUFFERS, MODULES, *HOOKS)
"""The dicts that come first among those watched, after ``__dict__`` itself."""
_PARAMETERS_AT, _BUFFERS_AT, _MODULES_AT = 1, 2, 3
NO_ATTRIBUTES = frozenset([*OWN, *OF_HOOKS, *_LEFT])

DEPTH = 4
"""How many containers and objects deep a change in place is seen."""
MOST = 5_000
"""How much hanging on one part is looked at."""
_LOOKED_AT_BYTES = 4096
LONGEST = 10_000
"""Containers of more elements are not looked into: comparing them would take more than 0.1 ms at every run."""

_ATOMS = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type, type(...), type(NotImplemented)),
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    ]
)
_OWN_OBJECTS = f"{__name__.partition('.')[0]}."
_WITHOUT_CONTENT = (nn.Module, torch.Tensor, Optimizer, type, types.MethodType, types.ModuleType)
Container = Any
"""A dict, list, deque or set, live or kept; a tuple stands for itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a container hangs.

    Args:
        home: the number, among those watched, of what holds it.
        key: of the attribute or item there.
        value: the container, or the object whose attributes it is.
    """

    home: int
    key: Any
    value: Any


class Distinct(TorchFunctionMode):
    """Inside the block two tensors that are not the same object are unequal, and no kernel is called for it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return False


def is_atom(value: Any) -> bool:
    """Whether it is every replica's as it is: nothing in it can change, or it is this package's, such as a strategy."""
    kind = type(value)
    return kind in _ATOMS or isinstance(value, enum.Enum) or kind.__module__.startswith(_OWN_OBJECTS)


class Slots(MutableMapping[str, Any]):
    """The attributes of an object whose class has ``__slots__``, as those of others are in their ``__dict__``.

    Args:
        of: the object.
    """

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._of, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._of, name, value)  # of frozen ones too

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._of, name)

    def __iter__(self) -> Iterator[str]:
        for kind in type(self._of).__mro__:
            names = vars(kind).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__weakref__", "__dict__") and hasattr(self._of, name):
                    yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other


def content_of(value: Any) -> Container | None:
    """The items or attributes of ``value``, as they are held; None for what has none that are looked at."""
    if type(value) in weakref.ProxyTypes:
        return None
    if isinstance(value, (dict, list, deque, set, tuple)):
        return value
    if is_atom(value) or isinstance(value, _WITHOUT_CONTENT):
        return None
    own: Container | None = getattr(value, "__dict__", None)
    if own is None and hasattr(type(value), "__slots__") and not isinstance(value, os.PathLike):
        return Slots(value)
    return own


def is_array(value: Any) -> bool:
    """Whether its values are changed in place, as those of a tensor or a NumPy array are."""
    kind = type(value)
    return isinstance(value, torch.Tensor) or (kind.__name__ == "ndarray" and kind.__module__ == "numpy")


def mark_of(array: Any) -> object:
    """By what to tell whether an array was written: the version of a tensor, and on a CPU its first bytes.

    A write through ``.data`` counts no version, and NumPy counts none.
    """
    if not isinstance(array, torch.Tensor):
        seen = array.dtype != object and array.flags.c_contiguous
        return ctypes.string_at(array.ctypes.data, min(_LOOKED_AT_BYTES, array.nbytes)) if seen else None
    version = 0 if array.is_inference() else array._version
    seen = array.layout is torch.strided and array.is_cpu and array.is_contiguous() and type(array) is torch.Tensor
    if not seen or not array.numel():
        return version
    return version, ctypes.string_at(array.data_ptr(), min(_LOOKED_AT_BYTES, array.nbytes))


def write(into: Any, array: Any) -> None:
    """Gives an array or tensor the values of another."""
    if not isinstance(into, torch.Tensor):
        into[...] = array
    elif into.shape == array.shape:
        into.copy_(array)
    else:
        into.data = array.detach().to(into.device, copy=True)


def items_of(content: Container) -> Iterator[tuple[Any, Any]]:
    """Keys and values, or numbers and items; nothing for a set."""
    if isinstance(content, (dict, Slots)):
        yield from content.items()
    elif not isinstance(content, set):
        yield from enumerate(content)


def _dicts_of(part: nn.Module) -> list[Container]:
    """``__dict__`` and those of ``OWN``. A scripted module keeps its own in C++, where nothing is set from outside."""
    if isinstance(part, torch.jit.ScriptModule):
        tensors = (part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        return [{}, *map(dict, tensors), *({} for _ in OWN[2:])]
    own = part.__dict__
    return [own, *(own[name] for name in OWN)]


def equal(live: Container, kept: Container) -> bool:
    """Whether two structures are the same, or equal, in every element; what cannot be compared is not equal."""
    try:
        return bool(live == kept)
    except (ValueError, TypeError, RuntimeError):  # arrays say so of themselves
        return False


def item(content: Container, key: Any) -> Any:
    """What is there, or None."""
    if isinstance(content, (dict, Slots)):
        return content.get(key)
    return content[key] if isinstance(content, (list, deque, tuple)) and key < len(content) else None


def _shallow(content: Container) -> Container:
    if isinstance(content, (dict, Slots)):
        return dict(content)
    if isinstance(content, (list, set)):
        return content.copy()
    return deque(content) if isinstance(content, deque) else content


class ModuleSnapshot:
    """One part of the user's module, and the other replicas' copies of it.

    Attributes:
        live: the containers, as they are now: ``__dict__``, those of ``OWN``, and what hangs on the attributes.
        kept: the same as they were when last seen.
        places: where those after ``OWN`` hang.
        held: each container or object with what holds it and its key there, to see whether it is still the same one.
        tensors: of the tensors and arrays among attributes and what hangs on them, the number of what holds each, and
            its key there.

    Args:
        part: of the user's module.
        twins: the other replicas' copies.
        owners: whose each container is that several parts hold, by id.
    """

    def __init__(self, part: nn.Module, twins: tuple[nn.Module, ...], owners: dict[int, ModuleSnapshot]) -> None:
        self.part = part
        self.twins = twins
        self._owners = owners
        self.keep()

    def keep(self) -> None:
        """Takes all as it is now."""
        self.live: list[Container] = _dicts_of(self.part)
        own = self.live[0]
        self.kept: list[Container] = [dict(each) for each in self.live]
        self.places: list[Place] = []
        self.held: list[tuple[Container, Any, Any]] = []
        self.tensors: list[tuple[int, Any]] = []
        todo = [(0, name, value, 0) for name, value in own.items() if name not in NO_ATTRIBUTES]
        for home, key, value, depth in todo:  # grows
            if type(value) in _ATOMS or len(self.held) == MOST:
                continue
            if is_array(value):
                self.tensors.append((home, key))
                if not isinstance(value, torch.Tensor):
                    self.held.append((self.live[home], key, value))
                continue
            content = content_of(value)
            if content is None or (type(value) is tuple and all(map(is_atom, value))):
                continue
            self.held.append((self.live[home], key, value))
            if depth == DEPTH or len(content) > LONGEST or self._owners.setdefault(id(value), self) is not self:
                continue
            self._add(Place(home, key, value), content)
            number = len(self.live) - 1
            todo += [(number, inner, each, depth + 1) for inner, each in items_of(content)]

    def keep_again(self) -> set[int]:
        """``keep``; gives the ids of containers that are looked at here no more, which other parts may hold too."""
        before = {id(place.value) for place in self.places}
        for owned in before:
            del self._owners[owned]
        self.keep()
        return before - {id(place.value) for place in self.places}

    def keep_simple(self) -> bool:
        """``keep``, where only plain values, tensors and buffers were set anew; else does nothing and says False."""
        own, kept = self.live[0], self.kept[0]
        buffers = _BUFFERS_AT
        others = [number for number in range(1, len(self.live)) if number != buffers]
        with Distinct():
            if any(self.live[number] != self.kept[number] for number in others) or own.keys() != kept.keys():
                return False
        if self.live[buffers].keys() != self.kept[buffers].keys():
            return False
        differing = [(name, value) for name, value in own.items() if kept[name] is not value]
        slots = {key for home, key in self.tensors if home == 0}
        for name, value in differing:
            tensor = isinstance(value, torch.Tensor)
            if tensor != (name in slots) or not (tensor or (type(value) in _ATOMS and type(kept[name]) in _ATOMS)):
                return False
        kept.update(differing)
        self.kept[buffers].update(self.live[buffers])
        return True

    def differs(self) -> bool:
        """Whether anything is another than when last seen, or has other contents. Asked inside ``Distinct``."""
        if type(self.part) is not type(self.twins[0] if self.twins else self.part):
            return True
        return not equal(self.live, self.kept) or any(
            container[key] is not value for container, key, value in self.held
        )

    def plain_changes(self) -> dict[str, Any] | None:
        """The attributes that have other plain values, if nothing else differs; else None."""
        own, kept = self.live[0], self.kept[0]
        with Distinct():
            if own.keys() != kept.keys() or not equal(self.live[1:], self.kept[1:]):
                return None
        found = {name: value for name, value in own.items() if kept[name] is not value}
        both = ((value, kept[name]) for name, value in found.items())
        return found if all(type(value) in _ATOMS and type(old) in _ATOMS for value, old in both) else None

    def restructured(self) -> bool:
        """Whether it has other parameters or parts than when last seen, or other names of buffers."""
        with Distinct():
            others = any(self.live[number] != self.kept[number] for number in (_PARAMETERS_AT, _MODULES_AT))
        return others or self.live[_BUFFERS_AT].keys() != self.kept[_BUFFERS_AT].keys()

    def release(self) -> None:
        """Lets go of tensors, for a step may give up its own; ``take_back`` before the next comparison."""
        for home, key in self.tensors:
            if not isinstance(self.kept[home], tuple):
                self.kept[home][key] = None

    def take_back(self) -> None:
        """Tensors that were let go of are those that are there now."""
        for home, key in self.tensors:
            if not isinstance(self.kept[home], tuple):
                self.kept[home][key] = item(self.live[home], key)

    def seen_tensors(self) -> Iterator[Any]:
        """The tensors and arrays among attributes and what hangs on them."""
        for home, key in self.tensors:
            tensor = item(self.kept[home], key)
            if is_array(tensor):
                yield tensor

    def twin_contents(self, replica: int) -> list[Container | None]:
        """The other replica's counterpart of each of ``live``; None where it has another kind of thing there."""
        found: list[Container | None] = _dicts_of(self.twins[replica - 1])
        for place in self.places:
            home = found[place.home]
            value = None if home is None else item(home, place.key)
            found.append(content_of(value) if type(value) is type(place.value) else None)
        return found

    def pairs(self, replica: int) -> Iterator[tuple[Any, Any]]:
        """What was seen last and the other replica's counterpart: itself, weights, buffers, tensors and objects."""
        yield self.part, self.twins[replica - 1]
        contents = self.twin_contents(replica)
        for number in (_PARAMETERS_AT, _BUFFERS_AT):
            for name, tensor in self.kept[number].items():
                other = item(contents[number], name)
                if tensor is not None and other is not None:
                    yield tensor, other
        for place, content in zip(self.places, contents[len(OWN) + 1 :], strict=True):
            if content is not None:
                yield place.value, item(contents[place.home], place.key)
        for home, key in self.tensors:
            tensor, theirs = item(self.kept[home], key), None if contents[home] is None else item(contents[home], key)
            if is_array(tensor) and type(theirs) is type(tensor):
                yield tensor, theirs

    def _add(self, place: Place, content: Container) -> None:
        self.live.append(content)
        self.kept.append(_shallow(content))
        self.places.append(place)
