"""Copies of a module, one for each replica, and which of them share one storage of the weights.

Replicas of one physical device without a memory limit share the storage of the weights, and each has its own gradients
and buffers. With a memory limit every replica has its own weights, since the user wants to see what as many real
devices would hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pickle import PickleError
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep._torch_compat import make_subclass
from lockstep.config import LogicalDevice
from lockstep.errors import UsageError


def storage_groups(devices: Sequence[LogicalDevice]) -> tuple[tuple[int, ...], ...]:
    """The replicas by storage: each inner tuple shares one copy of the weights; its first replica is the leader."""
    groups: dict[str, list[int]] = {}
    for replica, device in enumerate(devices):
        shared = device.memory_limit is None
        groups.setdefault(device.physical.name if shared else f"{device.name} alone", []).append(replica)
    return tuple(tuple(members) for members in groups.values())


class Copying:
    """Copies the user's module, or what is set on it later, for one other replica.

    Args:
        home: the device of the user's module.
        device: the replica's.
        alias: share the storage of the parameters, instead of copying it.
        leader: how the replica was served whose storage is shared, or None for the user's own.
        known: the id of what has a copy for this replica already -> that copy; such are taken as they are.
    """

    def __init__(
        self,
        home: torch.device,
        device: torch.device,
        *,
        alias: bool,
        leader: Copying | None = None,
        known: Mapping[int, Any] | None = None,
    ) -> None:
        self._alias = alias
        self._device = device
        self._leader = leader
        self._taking = _TakingTensors(home, device)
        # deepcopy asks its memo first: what it finds there is taken as it is, so that ties survive.
        self._memo: dict[int, Any] = dict(known or {})

    def of(self, value: Any, name: str) -> Any:
        """The replica's copy of ``value``.

        Args:
            value: a module, a parameter, or anything else that is set on a module.
            name: what it is called in an error.

        Raises:
            UsageError: it cannot be copied.
        """
        for parameter in _parameters_of(value):
            if id(parameter) not in self._memo:
                source = parameter if self._leader is None else self._leader.twin(parameter)
                self._memo[id(parameter)] = _copy_parameter(source, self._device, self._alias)
        try:
            with self._taking:
                return copy.deepcopy(value, self._memo)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError, PickleError) as error:
            raise UsageError(
                f"{name} cannot be copied for every replica ({error}); mirror a module that copy.deepcopy can copy, "
                "and keep what it cannot copy outside the module"
            ) from error

    def twin(self, parameter: nn.Parameter) -> nn.Parameter:
        """The copy that was made of a parameter."""
        found: nn.Parameter = self._memo.get(id(parameter), parameter)
        return found


class _TakingTensors(TorchFunctionMode):
    """Has deepcopy take tensors with a history too, without it, and puts what was at home on the replica's device.

    A tensor with a history is what hooks compute from the parameters at every call (weight_norm, pruning), or what was
    kept of a call.
    """

    def __init__(self, home: torch.device, device: torch.device) -> None:
        super().__init__()
        self._home = home
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            duplicate = func(tensor, memo) if tensor.is_leaf else tensor.detach().clone()
            memo[id(tensor)] = duplicate.to(self._device) if tensor.device == self._home else duplicate
        return memo[id(tensor)]


def copy_module(module: nn.Module, device: torch.device, *, alias: bool) -> nn.Module:
    """A copy of ``module`` on ``device``; tied weights stay tied.

    Args:
        module: whose weights and buffers are on their device already.
        device: where the copy's buffers, and its own weights, go.
        alias: share the storage of the parameters, instead of copying it.

    Raises:
        UsageError: the module cannot be copied.
    """
    duplicate: nn.Module = Copying(home_of(module), device, alias=alias).of(module, type(module).__name__)
    return duplicate


def home_of(module: nn.Module) -> torch.device:
    """Where the module's tensors are."""
    return next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _parameters_of(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, nn.Parameter):
        yield value


def uses_channels_last(module: nn.Module) -> bool:
    """Whether ``memory_format="auto"`` means channels_last: the module has 2-d convolutions.

    On a CPU the convolutions of MobileNetV2 in channels_last take 0.6 to 0.7 of the time of the default format.
    """
    return any(isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)) for part in module.modules())


def _copy_parameter(parameter: nn.Parameter, device: torch.device, alias: bool) -> nn.Parameter:
    kind = type(parameter)
    of_its_own_kind = kind is not nn.Parameter and issubclass(kind, nn.Parameter)
    if of_its_own_kind and not alias and not parameter.requires_grad:
        # Quantised: what its numbers mean stands beside them, and its own class knows how to take that along.
        moved: nn.Parameter = copy.deepcopy(parameter).to(device)  # type: ignore[assignment]
        return moved
    data = parameter.data if alias else parameter.data.to(device, copy=True)
    # bitsandbytes asks for a weight's class, and quantises once more what is not of its own.
    make = partial(make_subclass, kind) if of_its_own_kind else nn.Parameter
    duplicate: nn.Parameter = make(data, parameter.requires_grad)
    duplicate.__dict__.update(parameter.__dict__)
    return duplicate
