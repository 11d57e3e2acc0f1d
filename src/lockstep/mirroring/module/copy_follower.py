"""Copies what the user changes on the module between runs (attributes, weights, buffers, hooks, ...) to all replicas.

    user's module  --- after a run: snapshot ---.
                                                +-- before the next run or read: differences --> copies 1, 2, ...
    user's module  --- before the next run -----'

A snapshot has a shallow copy of each submodule's ``__dict__`` and of its dicts of weights, buffers, submodules and
hooks, so that one comparison in C finds what was set or removed. Comparing a module of 200 submodules takes 60 us. The
snapshot also describes the content of containers and objects in attributes. If the content of an attribute differs, the
whole attribute is copied. Changes of tensors in place are found by their version, address and, on a CPU, first bytes.
The next snapshot has what a replica sets on its copy during a run, so this stays the replica's own.
"""

from __future__ import annotations

import copyreg
import ctypes
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lockstep.errors import UsageError
from lockstep.introspection import attribute_of, attributes_of, is_kind, module_of
from lockstep.mirroring.module.copies import Copying, Copyings

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""How torch is to call hooks: dicts with the keys of the dicts of hooks."""
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_OF_USER_ALONE = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    "_compiled_call_impl",
)
_NO_ATTRIBUTES = frozenset([*_REGISTRIES, *_HOOK_FLAGS, *_OF_USER_ALONE])

_DEPTH = 4
"""How many containers and objects deep a change in place is seen."""
_MAX_CONTAINERS = 2_000  # are described at every run, which takes 2 us each
_MAX_ITEMS = 10_000
"""Larger containers are not looked into: comparing one would take more than 0.5 ms at every run."""
_COMPARED_BYTES = 4096
"""Of a tensor on a CPU or a NumPy array: a write through ``.data`` or NumPy counts no version."""

# By exact type: an instance of a subclass of int or str may have attributes that change.
_ATOMS = frozenset(
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
_Entry = tuple[dict[str, Any], str]
"""A dict of a submodule and a key in it."""


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


@dataclass(slots=True, eq=False)
class _Node:
    """A dict of one of the user's submodules: as it is now, and a shallow copy from the last snapshot."""

    live: dict[str, Any]
    snapshot: dict[str, Any]
    number: int  # of the submodule
    name: str  # of the dict, such as "_buffers"; "" is ``__dict__``

    def restructures(self) -> bool:
        """Whether a difference here is another parameter or submodule, or another name of a buffer."""
        same_names = self.name == "_buffers" and self.live.keys() == self.snapshot.keys()
        return self.name in ("_parameters", "_buffers", "_modules") and not same_names


_Difference = tuple[_Node, list[str], dict[str, Any]]
"""What was removed from the dict of a node, and what was set in it."""


class CopyFollower:
    """Has the copies of one mirrored module, the first of which is the user's, follow it.

    ``peers`` returns the propagations of all modules of the strategy, which may have submodules in common. ``alone``
    says that there is no other copy, here or on other workers, that would have to follow.
    """

    def __init__(
        self,
        copies: Sequence[nn.Module],
        devices: Sequence[torch.device],
        groups: Sequence[Sequence[int]],
        peers: Callable[[], Iterable[CopyFollower]],
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._copies = copies
        self._devices = devices
        self._groups = groups
        self._leaders = [group[0] for group in groups]
        self._peers = peers
        self._name = type(copies[0]).__name__
        self._in_run = False
        self._tensor_ids: set[int] = set()
        self._fresh: list[tuple[torch.Tensor, ...]] = []
        self._returned_means: list[tuple[torch.Tensor, int, Sequence[torch.Tensor]]] = []
        self._read_structure()
        self.remember()

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """The parameters of the user's module, as of the last snapshot."""
        return self._weights[0]

    def before_run(self) -> bool:
        """Copies the user's changes to the module since the last run to all replicas.

        Returns whether any copy has other weights, buffers or submodules than before, or weights in other memory.
        Raises UsageError if something was set that cannot be copied.
        """
        if self._alone:
            return False
        if self._in_run:  # begun before, and not run
            self._in_run = False
            self._remember_attributes()
            self.remember()
        changed = self.bring_changes()
        changed |= self._align_modes()
        self._release_attributes()
        return changed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in the middle of a run. What it sets on the user's module is set on all copies."""
        self.after_run(failed=True)
        try:
            yield
        finally:
            if not self._alone:
                self.bring_changes()
                self._release_attributes()

    def bring_changes(self) -> bool:
        """Does so for reads and loads between runs too, but leaves training modes and frozen parameters."""
        if self._in_run or self._alone:
            return False
        moved = self._copy_values()
        if self._is_unchanged():
            return moved
        differences = self._differences()
        restructured = any(node.restructures() for node, *_ in differences)
        self._apply(differences)
        if restructured:
            self._read_structure()
            # A parameter may have another name now: the copy that has this name has the former parameter's values.
            for value, (_, _, entries) in zip(self._current(), self._watched, strict=True):
                if isinstance(value, nn.Parameter):
                    _write(value, entries)
        else:
            self._take_snapshot()
        self.remember()
        return moved or restructured or any(node.name == "_buffers" for node, *_ in differences)

    def after_run(self, *, failed: bool = False) -> None:
        """Ends a run: keeps what each replica has set on its copy.

        Raises UsageError if a replica has added weights, or submodules that other copies do not have.
        """
        if self._in_run:
            self._in_run = False
            self._remember_attributes()
            if not self._is_unchanged():
                if not any(node.restructures() for node, *_ in self._differences()):
                    self._take_snapshot()
                elif not failed:  # else the next run brings what only the user's module has
                    self._refuse_new_weights()
                    self._read_structure()
        self.remember()

    def remember(self) -> None:
        """Notes the present tensors of all copies: one that changes from now on was changed in the user's module."""
        self._returned_means.clear()
        self._replayed = False
        if len(self._copies) > 1:
            self._marks, self._bytes = self._tensor_marks()
            self._versions = _versions(self._duplicates)

    def remember_replay(self) -> None:
        """Notes that a CUDA graph has written to all copies. It counts no version, so bytes may differ."""
        self._replayed = True

    def remember_read(self, value: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
        """Notes that the program gets a mean over ``copies``, and may write into it as into a plain buffer."""
        if len(copies) > 1 and _address(value) != _address(copies[0]):
            self._returned_means.append((value, _version(value), copies))

    def add_counterparts(self, replica: int, counterparts: dict[int, Any], changed: Set[int]) -> None:
        """Adds, by the id of each object in the last snapshot, its counterpart in a copy, unless it has ``changed``."""
        for part, duplicate in zip(self._parts[0], self._parts[replica], strict=True):
            counterparts.setdefault(id(part), duplicate)
        pairs = [
            (node, name) for node in self._nodes if node.name in ("_parameters", "_buffers") for name in node.snapshot
        ]
        for node, name in (*pairs, *self._attributes):
            value = node.snapshot.get(name)
            duplicate_value = None if value is None else self._counterpart(node, replica).get(name)
            if duplicate_value is not None and type(duplicate_value) is type(value) and id(value) not in changed:
                counterparts.setdefault(id(value), duplicate_value)

    def take_fresh(self) -> list[tuple[torch.Tensor, ...]]:
        """The weights and buffers, each with its copies, that were added since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    # The snapshot.

    def _read_structure(self) -> None:
        """Finds the submodules, weights and buffers of all copies, and makes a snapshot."""
        self._parts = [list(duplicate.modules()) for duplicate in self._copies]
        self._weights = [list(duplicate.parameters()) for duplicate in self._copies]
        buffers = [list(duplicate.buffers()) for duplicate in self._copies]
        for kind, members in (("submodules", self._parts), ("parameters", self._weights), ("buffers", buffers)):
            counts = list(map(len, members))
            if len(set(counts)) > 1:
                raise UsageError(
                    f"the replicas' copies of {self._name} have {', '.join(map(str, counts))} {kind}: "
                    "the step registers some in one replica and not in others; register them in all alike, or on the "
                    "user's module outside strategy.run"
                )
        self._refuse_scripted()
        self._floating = [
            [
                parameter
                for parameter, original in zip(weights, self._weights[0], strict=True)
                if original.is_floating_point()
            ]
            for weights in self._weights
        ]
        self._addresses: list[list[int]] = []
        former_ids, self._tensor_ids = self._tensor_ids, {id(tensor) for tensor in (*self._weights[0], *buffers[0])}
        if former_ids:
            tensors = (*zip(*self._weights, strict=True), *zip(*buffers, strict=True))
            self._fresh += [copies for copies in tensors if id(copies[0]) not in former_ids]
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        """Makes a snapshot of the user's module."""
        self._nodes: list[_Node] = []
        for number, (part, *copies) in enumerate(zip(*self._parts, strict=True)):
            # A mirrored metric is one object in all copies, and has its own replicas. By identity: == of two
            # TensorDictParams (tensordict 0.15), which torchrl's losses hold, is a TensorDict without a truth value.
            if any(part is duplicate for duplicate in copies):
                continue
            for name in ("", *_REGISTRIES):
                content = _registry(part, name)
                self._nodes.append(_Node(content, dict(content), number, name))
        self._attributes = [
            (node, key)
            for node in self._nodes
            for key, value in (node.live.items() if not node.name else ())
            if type(value) not in _ATOMS and key not in _NO_ATTRIBUTES and _can_change(value)
        ]
        self._is_flat = [_is_flat(node.live[key]) for node, key in self._attributes]
        self._snapshot_content = [content.copy() if type(content) in _FLAT else content for content in self._content()]
        self._live, self._snapshots = [node.live for node in self._nodes], [node.snapshot for node in self._nodes]
        buffers, weights = (
            [(node, name) for node in self._nodes if node.name == registry for name in node.live]
            for registry in ("_buffers", "_parameters")
        )
        followers, leaders = range(1, len(self._copies)), self._leaders[1:]
        self._watched: list[tuple[dict[str, Any], str, list[_Entry]]] = [
            (node.live, name, [(self._counterpart(node, replica), name) for replica in replicas])
            for tensors, replicas in ((buffers, followers), (weights if leaders else [], leaders))
            for node, name in tensors
        ]
        self._duplicates = [entry for *_, entries in self._watched for entry in entries]
        self._windows: tuple[list[Any], list[Any]] = ([], [])
        self._kinds = list(map(type, self._parts[0]))

    def _content(self) -> list[Any]:
        """The present content of the attributes that can change in place: containers of atoms, or descriptions."""
        descriptions: dict[int, Any] = {}
        contents = zip(self._is_flat, [node.live.get(key) for node, key in self._attributes], strict=True)
        return [value if flat else _describe(value, self._tensor_ids, descriptions, _DEPTH) for flat, value in contents]

    def _is_unchanged(self) -> bool:
        """Whether nothing was set, removed or changed, but for tensors of the registries."""
        content = self._content()
        with _IdentityOfTensors():
            same = _equal(self._live, self._snapshots) and _equal(content, self._snapshot_content)
        return same and list(map(type, self._parts[0])) == self._kinds

    def _differences(self) -> list[_Difference]:
        changed: dict[int, list[str]] = {}
        pairs = zip(self._snapshot_content, self._content(), strict=True)
        with _IdentityOfTensors():
            for (node, key), (was, now) in zip(self._attributes, pairs, strict=True):
                if not _equal(now, was) and key in node.live:
                    changed.setdefault(id(node), []).append(key)
            differing = [
                node for node in self._nodes if id(node) in changed or not _equal([node.live], [node.snapshot])
            ]
        differences = []
        for node in differing:
            left_out = frozenset() if node.name else _NO_ATTRIBUTES
            keys = [key for key, value in node.live.items() if not _is_same(node.snapshot.get(key, _ABSENT), value)]
            keys = [key for key in (*keys, *changed.get(id(node), ())) if key not in left_out]
            removed = [key for key in node.snapshot if key not in node.live]
            differences.append((node, removed, {key: node.live[key] for key in keys}))
        return differences

    def _release_attributes(self) -> None:
        """Begins a run. Without this the snapshot would keep tensors alive that the step drops, such as features."""
        for node, key in self._attributes:
            node.snapshot[key] = None
        self._windows = ([], [])
        self._in_run = True

    def _remember_attributes(self) -> None:
        """Takes the present values of the attributes that were released for a run into the snapshot."""
        for node, key in self._attributes:
            node.snapshot[key] = node.live.get(key)

    # Bringing differences to the copies.

    def _apply(self, differences: Sequence[_Difference]) -> None:
        fresh = [(node, key, value) for node, _, set_there in differences for key, value in set_there.items()]
        plain = all(type(value) in _ATOMS for _, _, value in fresh)
        changed = {id(value) for node, key, value in fresh if node.snapshot.get(key) is value}  # in place
        # One copying for all differences, and for all modules of the strategy: deepcopy's memo keeps ties between them.
        copyings = Copyings(self._copies[0], self._devices, self._groups, (self, *self._peers()), changed)
        kinds = list(enumerate(zip(map(type, self._parts[0]), self._kinds, strict=True)))
        for replica, parts in enumerate(self._parts[1:], start=1):
            copying = None if plain else copyings[replica]  # before anything changes
            for at, (kind, former) in kinds:
                # A parametrization gives a module another class; without this the copies go on with the plain weights
                # (test_given_after_mirroring).
                if kind is not former:
                    parts[at].__class__ = kind
            for node, removed, values in differences:
                original, duplicate = self._parts[0][node.number], self._counterpart(node, replica)
                where = f"set on {type(original).__name__},"
                copied = {key: _copy(value, copying, f"{key!r}, {where}") for key, value in values.items()}
                for key in removed:
                    duplicate.pop(key, None)
                duplicate.update(copied)
                for key in node.live if copied and node.name else ():  # in the user's order
                    if key in duplicate:
                        duplicate[key] = duplicate.pop(key)
                for name in _HOOK_FLAGS if node.name in _HOOKS else ():
                    parts[node.number].__dict__[name].update(original.__dict__[name])

    def _counterpart(self, node: _Node, replica: int) -> dict[str, Any]:
        return _registry(self._parts[replica][node.number], node.name)

    # Tensors that were changed in place.

    def _current(self) -> list[Any]:
        """The tensors that are watched: buffers, and weights that others have in other memory."""
        return [tensors.get(name) for tensors, name, _ in self._watched]

    def _tensor_marks(self) -> tuple[list[Any], list[bytes]]:
        """Each watched tensor's id, address and version; and its first bytes, if it is on a CPU."""
        tensors = self._current()
        # Attributes are read without a check, as in _versions: this runs at every step for every buffer. A tensor that
        # has none of them is rare and takes the slow way.
        try:
            marks = [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]
        except (AttributeError, RuntimeError):  # None, or a sparse or an inference tensor
            marks = [(id(tensor), _address(tensor), _version(tensor)) for tensor in tensors]
        addresses = [mark[:2] for mark in marks]
        if self._windows[0] != addresses:
            self._windows = (addresses, list(map(_window, tensors)))
        return marks, [window.raw for window in self._windows[1]]

    @torch.no_grad()
    def _copy_values(self) -> bool:
        """Writes to all copies what was written into the user's tensors; returns whether any was in other memory."""
        if len(self._copies) == 1:
            return False
        # A buffer that was read outside is a mean in a tensor of its own; what was written into it goes to all copies
        # (test_what_is_written_into_buffers_read_outside_is_written).
        read = [(value, copies) for value, version, copies in self._returned_means if _version(value) != version]
        for value, copies in read:
            for buffer in copies:
                buffer.copy_(value)
        marks, contents = self._tensor_marks()
        # Bytes beside versions: a write through .data or NumPy counts no version.
        if marks == self._marks and (self._replayed or contents == self._bytes):
            if read:
                self.remember()
            return False
        versions, at, moved = _versions(self._duplicates), 0, False
        for index, (value, (_, _, entries)) in enumerate(zip(self._current(), self._watched, strict=True)):
            # What a replica or load_state_dict has written to the copies itself stays
            # (test_what_is_written_into_all_copies_stays_as_it_was_written).
            unwritten = versions[at : at + len(entries)] == self._versions[at : at + len(entries)]
            at += len(entries)
            was, now = self._marks[index], marks[index]
            same = now == was and (self._replayed or contents[index] == self._bytes[index])
            if same or now[0] != was[0] or not unwritten:  # another object is a difference in a dict
                continue
            moved |= now[1] != was[1]
            _write(value, entries)
        if moved:
            self._share_weights()
        self.remember()
        return moved

    # Training modes, frozen parameters and shared storages.

    def _align_modes(self) -> bool:
        """The training mode, the frozen parameters and the storage of the weights are the user's module's."""
        # Compared as lists first: part.training = mode goes through Module.__setattr__, and mostly nothing has changed.
        modes = [part.training for part in self._parts[0]]
        trained = [weight.requires_grad for weight in self._weights[0]]
        for parts, weights in zip(self._parts[1:], self._weights[1:], strict=True):
            if [part.training for part in parts] != modes:
                for part, mode in zip(parts, modes, strict=True):
                    part.training = mode
            if [weight.requires_grad for weight in weights] != trained:
                for weight, requires_grad in zip(weights, trained, strict=True):
                    weight.requires_grad_(requires_grad)
        return self._share_weights()

    def _share_weights(self) -> bool:
        """Has each group share its leader's storage again, if the weights were given another (``.data = ``)."""
        addresses = [[weight.data_ptr() for weight in self._floating[leader]] for leader in self._leaders]
        if addresses == self._addresses:
            return False
        self._addresses = addresses
        moved = False
        for leader, *members in self._groups:
            for member in members:
                for weight, source in zip(self._floating[member], self._floating[leader], strict=True):
                    if weight.data_ptr() != source.data_ptr():
                        weight.data = source.data
                        moved = True
        return moved

    def _refuse_scripted(self) -> None:
        # TorchScript gave other gradients where copies ran in several threads (test_one_that_is_trained_is_refused).
        for part in self._parts[0] if len(self._copies) > 1 else ():
            if isinstance(part, torch.jit.ScriptModule) and any(
                parameter.requires_grad for parameter in part.parameters()
            ):
                raise UsageError(
                    f"{self._name} has a scripted module ({part.original_name}) with weights that are trained, and "
                    "TorchScript loses gradients of copies that run beside each other; mirror the module that it was "
                    "scripted from and script it after training, or freeze its parameters with requires_grad_(False)"
                )

    def _refuse_new_weights(self) -> None:
        for name, parameter in self._copies[0].named_parameters():
            if id(parameter) not in self._tensor_ids:
                raise UsageError(
                    f"the step gives {self._name} a new parameter, {name!r}, of which each replica makes its own; set "
                    "it on the module outside strategy.run, where all copies follow"
                )


@torch.no_grad()
def _write(value: Any, entries: Iterable[_Entry]) -> None:
    """Gives the copies' tensors the values of the user's."""
    for tensors, name in entries:
        duplicate = tensors.get(name)
        if not isinstance(duplicate, torch.Tensor):
            continue
        if duplicate.shape == value.shape and duplicate.dtype == value.dtype and not duplicate.is_inference():
            duplicate.copy_(value)
        elif isinstance(duplicate, nn.Parameter):
            duplicate.data = value.detach().to(duplicate.device, copy=True)
        else:
            tensors[name] = value.detach().to(duplicate.device, copy=True)


def _copy(value: Any, copying: Copying | None, label: str) -> Any:
    is_shared = type(value) in _ATOMS or (
        module_of(type(value)).startswith(_THIS_PACKAGE) and not is_kind(value, nn.Module)
    )
    return value if is_shared or copying is None else copying.of(value, label)


def _registry(part: nn.Module, name: str) -> dict[str, Any]:
    """A dict of a submodule by name; "" is ``__dict__``. A scripted module keeps its tensors in C++."""
    if isinstance(part, torch.jit.ScriptModule):
        if name == "_parameters":
            return dict(part.named_parameters(recurse=False))
        return dict(part.named_buffers(recurse=False)) if name == "_buffers" else {}
    registry: dict[str, Any] = part.__dict__[name] if name else part.__dict__
    return registry


def _describe(value: Any, weights: set[int], descriptions: dict[int, Any], depth: int) -> Any:
    """What is equal as long as nothing has changed in a container, object, tensor or array."""
    if type(value) in _ATOMS:
        return value
    description = descriptions.get(id(value))
    if description is not None:
        return description
    description = descriptions[id(value)] = [_Identity(value)]
    # A weak proxy answers for the object that it stands for, and raises once that is gone.
    if type(value) in weakref.ProxyTypes or id(value) in weights:
        return description
    if _is_array(value):
        description += (_address(value), _version(value), _window(value).raw)
        return description
    content = _content_of(value) if depth and len(descriptions) < _MAX_CONTAINERS else None
    if type(content) is set:
        description.append(set(content))
    elif type(content) is dict and len(content) <= _MAX_ITEMS:
        description.append({key: _describe(item, weights, descriptions, depth - 1) for key, item in content.items()})
    elif content is not None and len(content) <= _MAX_ITEMS:
        description.append([_describe(item, weights, descriptions, depth - 1) for item in content])
    return description


def _is_flat(value: Any) -> bool:
    """Whether it is a container of atoms, which is compared in C."""
    if type(value) not in _FLAT or len(value) > _MAX_ITEMS:
        return False
    return all(type(item) in _ATOMS for item in (value.values() if type(value) is dict else value))


def _can_change(value: Any) -> bool:
    """Whether something in it can change in place that is looked at."""
    if type(value) is tuple:
        return not all(type(item) in _ATOMS for item in value)
    return type(value) not in weakref.ProxyTypes and (_is_array(value) or _content_of(value) is not None)


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
    return former is value or (type(former) is type(value) and type(value) in _ATOMS and bool(former == value))


def _is_array(value: Any) -> bool:
    """Whether its values are changed in place, as those of a tensor or a NumPy array are."""
    kind = type(value)
    return issubclass(kind, torch.Tensor) or ("numpy" in sys.modules and kind is sys.modules["numpy"].ndarray)


def _equal(live: Any, former: Any) -> bool:
    """Whether two structures have the same or equal elements; what cannot be compared is not equal.

    Python compares elements that are the same object by identity, and calls ``==`` only on those that were set anew.
    """
    try:
        return bool(live == former)
    except Exception:  # noqa: BLE001 - arrays cannot, and a comparison of the user's may raise anything
        return False


def _versions(entries: Sequence[_Entry]) -> list[int]:
    try:
        return [tensors[name]._version for tensors, name in entries]
    except (AttributeError, KeyError, RuntimeError):
        return [_version(tensors.get(name)) for tensors, name in entries]


def _version(array: Any) -> int:
    if not isinstance(array, torch.Tensor):
        return -1
    return 0 if array.is_inference() else array._version


def _address(array: Any) -> int:
    if not isinstance(array, torch.Tensor):
        return array.ctypes.data if _is_array(array) else 0
    try:
        return array.data_ptr()
    except RuntimeError:  # a sparse tensor has no storage of its own
        return 0


def _window(array: Any) -> Any:
    """A view of the first bytes of a plain tensor on a CPU or of a NumPy array; an empty one of others."""
    if isinstance(array, torch.Tensor):
        is_readable = (
            type(array) is torch.Tensor and array.layout is torch.strided and array.is_cpu and array.is_contiguous()
        )
    else:
        is_readable = _is_array(array) and array.dtype != object and array.flags.c_contiguous
    # A view into the memory, made once for each address: reading its bytes takes no call of torch or NumPy.
    address = _address(array) if is_readable else 0
    if not address:
        return (ctypes.c_char * 0)()
    return (ctypes.c_char * min(_COMPARED_BYTES, array.nbytes)).from_address(address)
