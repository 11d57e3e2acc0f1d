"""Copies of a module, one for each replica, and which of them alias one storage of the weights.

Replicas of one physical device alias the weights, and each has its own gradients and buffers. With a memory limit every
replica has its own weights, since the user wants to see what as many real devices would hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from pickle import PickleError
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep._torch_compat import make_subclass
from lockstep.config import LogicalDevice
from lockstep.errors import UsageError
from lockstep.introspection import is_kind
from lockstep.mirroring.module.wrappers import is_wrapper

_DEEPCOPY: Any = torch.Tensor.__deepcopy__


def storage_groups(devices: Sequence[LogicalDevice]) -> tuple[tuple[int, ...], ...]:
    """The replicas by storage: each inner tuple shares one copy of the weights; its first replica is the leader."""
    groups: dict[str, list[int]] = {}
    for replica, device in enumerate(devices):
        shared = device.memory_limit is None
        groups.setdefault(device.physical.name if shared else f"{device.name} alone", []).append(replica)
    return tuple(tuple(members) for members in groups.values())


class Copying(TorchFunctionMode):
    """Copies the user's module, on device ``home``, or what is set on it later, for one other replica.

    Args:
        home: the device of the user's module; only tensors on it are moved.
        device: the replica's device.
        alias: whether parameters have the storage of the user's, or of the copies that ``leader`` makes.
        leader: makes the copies of the replica whose storage this one shares; None for the user's own module.
        counterparts: the id of an object that has a copy for this replica already -> that copy.
    """

    def __init__(
        self,
        home: torch.device,
        device: torch.device,
        *,
        alias: bool,
        leader: Copying | None = None,
        counterparts: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__()
        self._home, self._device, self._alias, self._leader = home, device, alias, leader
        # deepcopy asks its memo first: what it finds there is taken as it is, so that ties survive.
        self._memo: dict[int, Any] = dict(counterparts or {})

    def of(self, value: Any, name: str) -> Any:
        """The replica's copy of a module or anything set on one, which ``name`` names in errors; ties survive."""
        # Parameters first, into deepcopy's memo: deepcopy would give each a storage of its own.
        is_parameter = is_kind(value, torch.Tensor) and isinstance(value, nn.Parameter)
        for parameter in value.parameters() if is_kind(value, nn.Module) else [value] if is_parameter else ():
            if id(parameter) not in self._memo:
                source = parameter if self._leader is None else self._leader._memo.get(id(parameter), parameter)
                self._memo[id(parameter)] = _copy_parameter(source, self._device, self._alias)
        try:
            with self:
                return copy.deepcopy(value, self._memo)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError, ImportError, PickleError) as error:
            raise UsageError(
                f"{name} cannot be copied for every replica ({error}); mirror a module that copy.deepcopy can copy, "
                "and keep what it cannot copy outside the module"
            ) from error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Has deepcopy detach tensors with a history (weight_norm, pruning), and move those on the home device."""
        if func is not _DEEPCOPY:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            duplicate = func(*args) if tensor.is_leaf else tensor.detach().clone()
            memo[id(tensor)] = duplicate.to(self._device) if tensor.device == self._home else duplicate
        return memo[id(tensor)]


class CopySource(Protocol):
    """What has copies of modules and tensors already."""

    def add_counterparts(self, replica: int, counterparts: dict[int, Any], changed: Set[int]) -> None:
        """Adds, by the id of the original, the replica's copies of what has not ``changed``."""


class Copyings(dict[int, Copying]):
    """The ``Copying`` of each replica, made when it is asked for.

    ``peers`` may have submodules in common with it; what has ``changed``, by its id, gets a new copy.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        groups: Sequence[Sequence[int]],
        peers: Iterable[CopySource],
        changed: Set[int] = frozenset(),
    ) -> None:
        self._changed = changed
        self._module = module
        self._devices = devices
        self._leaders = {member: group[0] for group in groups for member in group}
        self._peers = tuple(dict.fromkeys(peers))

    def __missing__(self, replica: int) -> Copying:
        leader, counterparts = self._leaders[replica], dict[int, Any]()
        for peer in self._peers:
            peer.add_counterparts(replica, counterparts, self._changed)
        tensors = (*self._module.parameters(), *self._module.buffers())
        home = next((tensor.device for tensor in tensors), torch.device("cpu"))
        alias = leader != replica
        source = self[leader] if alias and leader else None
        copying = Copying(home, self._devices[replica], alias=alias, leader=source, counterparts=counterparts)
        return self.setdefault(replica, copying)


def uses_channels_last(module: nn.Module) -> bool:
    """Whether "auto" means channels_last, in which MobileNetV2's 2-d convolutions take 0.6 to 0.7 of the time."""
    return any(isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)) for part in module.modules())


def _moved(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """A copy of a parameter's numbers on a device. Int8Tensor of torchao 0.18 ignores ``copy=True``."""
    if is_wrapper(parameter) and parameter.device == device:
        return parameter.data.clone()
    return parameter.data.to(device, copy=True)


def _copy_parameter(parameter: nn.Parameter, device: torch.device, alias: bool) -> nn.Parameter:
    kind = type(parameter)
    is_subclass = kind is not nn.Parameter and issubclass(kind, nn.Parameter)
    if is_subclass and not alias and not parameter.requires_grad:
        # Quantised: the attributes say what its numbers mean, and its own class knows how to move them
        # (test_a_quantised_weight_keeps_its_class_and_what_it_means).
        moved: nn.Parameter = copy.deepcopy(parameter).to(device)  # type: ignore[assignment]
        return moved
    data = parameter.data if alias else _moved(parameter, device)
    # bitsandbytes looks at the class of a weight, and quantises again what has another one.
    make = partial(make_subclass, kind) if is_subclass else nn.Parameter
    duplicate: nn.Parameter = make(data, parameter.requires_grad)
    if is_wrapper(parameter):  # its inner tensors are attributes too, and the copy has its own
        duplicate.__dict__.update({**parameter.__dict__, **duplicate.__dict__})
    else:
        duplicate.__dict__.update(parameter.__dict__)
    return duplicate
