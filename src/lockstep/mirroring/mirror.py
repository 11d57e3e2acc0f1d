"""Making mirrored modules: place the user's module, copy it for the other replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lockstep.collectives.communicator import Workers, agree
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.batch_norm import convert_sync_batch_norm
from lockstep.mirroring.copies import Copying, home_of, storage_groups, uses_channels_last
from lockstep.mirroring.following import Following
from lockstep.mirroring.holding import Pipelined
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.plain_step import watch_plain_steps
from lockstep.replicas.device.streams import in_memory_of

MemoryFormat = Literal["auto", "preserve"] | torch.memory_format


def mirror_module(
    owner: object,
    module: nn.Module,
    devices: Sequence[LogicalDevice],
    workers: Workers,
    *,
    sync_batchnorm: bool,
    memory_format: MemoryFormat,
    pipeline: Pipelined | None = None,
    is_part: bool = False,
    shares_weights: bool = False,
    peers: Callable[[], Iterable[Following]] = tuple,
) -> MirroredModule:
    """One copy of ``module`` per device; the first is ``module`` itself, moved to the first device in place.

    Args:
        owner: the strategy.
        module: the user's module.
        devices: one per local replica.
        workers: all workers, who get the chief's weights.
        sync_batchnorm: have batch norms take their statistics over the global batch; torch's SyncBatchNorm always does.
        memory_format: "auto" is channels_last where there are 2-d convolutions; "preserve" leaves the weights alone.
        pipeline: how a step passes through the module, where it cannot be called by itself.
        is_part: whether other workers hold other parts of the model.
        shares_weights: whether each of ``workers`` has a share of the weights, its own.
        peers: gives those of all modules mirrored by the owner, so that modules that share a layer go on sharing it.

    Raises:
        UsageError: the module has parameters without a shape yet, or cannot be copied.
        ConfigError: no such memory format; a module on the meta device.
        ClusterError: another worker has another module.
    """
    _refuse_mirrored_parts(module)
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise UsageError("the module has lazy parameters without a shape; call it once on a batch before mirroring it")
    if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            f"{type(module).__name__} is on the meta device and has no numbers yet; ls.ParallelStrategy gives such a "
            'model its first ones, for any other make it outside torch.device("meta")'
        )
    # torch's own synchronised batch norm asks for it by its class.
    convert_sync_batch_norm(module, _BatchNorm if sync_batchnorm else nn.SyncBatchNorm)
    layout = _layout(module, memory_format)
    with in_memory_of(devices[0]):
        _place(module, devices[0], layout)
    if not workers.alone and not shares_weights:
        agree(workers, "the model", signature(module))
        with torch.no_grad():
            workers.broadcast("the chief's weights", [*module.parameters(), *module.buffers()])
    watch_plain_steps()
    groups = storage_groups(devices)
    copies = _copies(module, devices, groups, peers)
    return MirroredModule(
        owner,
        copies,
        groups,
        workers,
        Following(
            copies,
            [device.torch_device for device in devices],
            groups,
            peers,
            alone=len(copies) == 1 and (workers.alone or is_part or shares_weights),
        ),
        pipeline,
        is_part=is_part,
        shares_weights=shares_weights,
        sync_batchnorm=sync_batchnorm,
    )


def _copies(
    module: nn.Module,
    devices: Sequence[LogicalDevice],
    groups: Sequence[Sequence[int]],
    peers: Callable[[], Iterable[Following]],
) -> list[nn.Module]:
    source = {member: group[0] for group in groups for member in group}
    copyings: dict[int, Copying] = {}
    copies = [module]
    for replica, device in enumerate(devices[1:], start=1):
        leader = source[replica]
        known: dict[int, Any] = {}
        for peer in peers():
            peer.fill(replica, known)
        copying = copyings[replica] = Copying(
            home_of(module),
            device.torch_device,
            alias=leader != replica,
            leader=copyings.get(leader),
            known=known,
        )
        with in_memory_of(device):
            copies.append(copying.of(module, type(module).__name__))
    return copies


def _refuse_mirrored_parts(module: nn.Module) -> None:
    children = (child for part in module.modules() for child in part._modules.items())
    for name, part in children:
        if isinstance(part, MirroredModule):
            raise UsageError(
                f"{type(module).__name__} has a mirrored module in it, as {name!r}; put the plain module there "
                "(mirrored.module), of which each replica has one copy, however many mirrored modules it is in"
            )


def signature(module: nn.Module) -> list[str]:
    """A line per parameter and buffer: what must be equal on all workers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}" for name, tensor in named]


def _place(module: nn.Module, device: LogicalDevice, layout: torch.memory_format | None) -> None:
    """Moves the user's module to the first replica's device, in place.

    What is on the GPU already is copied where that is divided: a share holds its own weights, in its own memory.
    """
    tensors = [*module.parameters(), *module.buffers()]
    there = any(each.device == device.torch_device for each in tensors)
    module.to(device.torch_device)
    if device.memory_limit is not None and there and all(type(each) is nn.Parameter for each in module.parameters()):
        module._apply(torch.clone)  # type: ignore[no-untyped-call]
    if layout is not None:
        module.to(memory_format=layout)  # type: ignore[call-overload]


def _layout(module: nn.Module, memory_format: MemoryFormat) -> torch.memory_format | None:
    if isinstance(memory_format, torch.memory_format):
        return memory_format
    if memory_format == "preserve":
        return None
    if memory_format == "auto":
        return torch.channels_last if uses_channels_last(module) else None
    raise ConfigError(
        f'memory_format={memory_format!r} is unknown; choose "auto", "preserve", torch.channels_last '
        "or torch.contiguous_format"
    )
