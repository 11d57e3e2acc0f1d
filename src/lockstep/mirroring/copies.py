"""One copy of a module per replica, and which of the copies share one storage of the weights.

Replicas of one physical device without a memory limit alias the parameters: one copy of the weights, each replica
with its own gradients. Buffers, such as batch-norm statistics, are each replica's own. With a memory limit every
replica holds its own weights, since the user asked to see what as many real devices would hold.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lockstep.config import LogicalDevice
from lockstep.errors import UsageError


def storage_groups(devices: Sequence[LogicalDevice]) -> tuple[tuple[int, ...], ...]:
    """The replicas by storage: each inner tuple shares one copy of the weights; its first replica is the leader."""
    groups: dict[str, list[int]] = {}
    for replica, device in enumerate(devices):
        shared = device.memory_limit is None
        groups.setdefault(device.physical.name if shared else f"{device.name} alone", []).append(replica)
    return tuple(tuple(members) for members in groups.values())


def copy_module(module: nn.Module, device: torch.device, *, alias: bool) -> nn.Module:
    """A copy of ``module`` on ``device``; tied weights stay tied.

    Args:
        module: whose weights and buffers are on their device already.
        device: where the copy's buffers, and its own weights, go.
        alias: share the storage of the parameters, instead of copying it.

    Raises:
        UsageError: the module cannot be copied.
    """
    # deepcopy asks its memo first: parameters found there are taken as they are, so that ties survive.
    memo = {id(parameter): _copy_parameter(parameter, device, alias) for parameter in module.parameters()}
    try:
        duplicate = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"{type(module).__name__} cannot be copied for every replica ({error}); "
            "mirror a module that copy.deepcopy can copy"
        ) from error
    for parent in duplicate.modules():
        for name, buffer in parent.named_buffers(recurse=False):
            setattr(parent, name, buffer.to(device))
    return duplicate


def align(source: nn.Module, duplicate: nn.Module, *, alias: bool) -> bool:
    """Gives ``duplicate`` the training mode and the frozen parameters of ``source``: the user changes only that one.

    Args:
        source: the user's module.
        duplicate: another replica's copy.
        alias: they share the weights' storage; a new one (``parameter.data = ...``, ``double()``) is shared again.

    Returns:
        Whether a weight's storage was a new one.
    """
    moved = False
    for ours, theirs in zip(source.modules(), duplicate.modules(), strict=True):
        if theirs.training is not ours.training:
            theirs.training = ours.training
        for mine, other in zip(ours._parameters.values(), theirs._parameters.values(), strict=True):
            if mine is not None and other is not None:
                moved |= _align_parameter(mine, other, alias=alias)
    return moved


def _align_parameter(mine: nn.Parameter, other: nn.Parameter, *, alias: bool) -> bool:
    if other.requires_grad is not mine.requires_grad:
        other.requires_grad_(mine.requires_grad)
    # Quantised weights are no floats, and their own class may have packed them anew, in each copy by itself.
    if alias and mine.is_floating_point() and other.data_ptr() != mine.data_ptr():
        other.data = mine.data
        return True
    return False


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
    make = partial(torch.Tensor._make_subclass, kind) if of_its_own_kind else nn.Parameter
    duplicate: nn.Parameter = make(data, parameter.requires_grad)
    duplicate.__dict__.update(parameter.__dict__)
    return duplicate
