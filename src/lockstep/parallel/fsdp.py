"""Full sharding: replicas share the weights of a model, or of a pipeline's stages, with PyTorch's FSDP.

    gpipe, 1f1b,    a microbatch in layer k: unshard -> forward -> reshard ... unshard -> backward -> sum gradients,
    interleaved     reshard

    zero_bubble,    unshard all layers -> forward, input and weight passes of all microbatches -> sum gradients, reshard
    zero_bubble_v   a weight pass may come long after the others, and its hooks know a layer's weights, not the layer

The first holds a layer's weights and gradients at a time, as without a pipeline, and sends as much for each microbatch.
The second holds a stage's for the length of a pass, and sends once. torch's schedules by themselves would keep
everything unsharded from a stage's first microbatch on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lockstep._torch_compat import tree_map, unsafe_view
from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import PipelineConfig
from lockstep.parallel.pipeline_stage import Stage

_SPLIT_BACKWARD = ("zero_bubble", "zero_bubble_v")
"""Schedules whose backward passes are in two."""


def shard_fully(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every parameter over the workers of ``mesh``, in place. All must call it; nothing is sent.

    Afterwards all of them must take part in each forward and backward pass, whether or not they have rows.

    Raises:
        ConfigError: a parameter is a single number.
    """
    _check_shardable(module)
    for unit in [*units_of(module), module]:
        # The root too: parameters outside the layers would otherwise stay unsharded after an evaluation.
        _apply_fsdp(unit, mesh, reshard_after_forward=True)


def shard_stages(
    module: nn.Module, stages: Sequence[Stage], pipelining: PipelineConfig, mesh: DeviceMesh
) -> StageWeights | None:
    """Shards a worker's stages over the workers of ``mesh``, in place. All must call it; nothing is sent.

    Returns:
        What goes around each pass; None where FSDP's own hooks unshard each part.

    Raises:
        ConfigError: a parameter that is a single number, or that two parts of one worker have in common.
    """
    _check_shardable(module)
    if pipelining.schedule in _SPLIT_BACKWARD:
        return StageWeights(module, stages, mesh)
    for stage in stages:
        parts = [part for part in stage.parts if any(True for _ in part.parameters())]
        if len(_without_ties(parts, module)) < len(parts):
            raise ConfigError(
                "two parts of a worker's stages have a weight in common, which shard_parameters=True lends to one at a "
                'time; choose shard_optimizer=True, or schedule="zero_bubble"'
            )
        _join(stage, [_shard_part(part, stage, mesh) for part in parts], mesh)
    return None


def _apply_fsdp(unit: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> FSDPModule:
    """Torch's ``fully_shard``, with gradients summed over ``mesh`` instead of averaged."""
    made = fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    return made


def _check_shardable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.ndim:
            raise ConfigError(f"{name} is a single number, which cannot be sharded; choose shard_optimizer=True alone")


def units_of(module: nn.Module) -> list[nn.Module]:
    """The modules that are unsharded at a time: the members of the outermost module lists, usually the layers.

    One that has a parameter in common with another module is left out, and unsharded with the rest.
    """
    return _without_ties(_members(module), module)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield child
        else:
            yield from _members(child)


def _without_ties(parts: Iterable[nn.Module], module: nn.Module) -> list[nn.Module]:
    """The parts of a module that have parameters, none of them in common with another part."""

    def uses(part: nn.Module) -> Counter[int]:
        return Counter(id(each) for _, each in part.named_parameters(remove_duplicate=False))

    in_all = uses(module)
    return [part for part in parts if (own := uses(part)) and all(in_all[each] == own[each] for each in own)]


class StageWeights:
    """Unshards all parts of a worker's stages for the length of a pass, for schedules whose backward is in two."""

    def __init__(self, module: nn.Module, stages: Sequence[Stage], mesh: DeviceMesh) -> None:
        layers = {id(layer) for layer in units_of(module)}
        parts = [part for stage in stages for part in stage.parts]
        units = [_Unit([part]) for part in parts if id(part) in layers]
        rest = [part for part in parts if id(part) not in layers]
        self._root = _Unit([*units, *rest])  # weights that first and last stage have in common are one here
        self._sharded = [_apply_fsdp(each, mesh, reshard_after_forward=False) for each in (*units, self._root)]

    @contextmanager
    def during(self, *, backward: bool) -> Iterator[None]:
        """Goes around a pass of a shard; all who share must make it, with or without rows.

        Inside the block the weights, and their gradients, are plain and whole; after a ``backward`` pass each worker
        has the sums of the gradients for its share.
        """
        with torch.no_grad():
            self._root(torch.zeros(()))  # torch finds the root of the units in the first forward pass
        for each in self._sharded:
            each.unshard()
        try:
            yield
            if backward:  # an empty backward pass, at whose end torch sums the gradients
                self._root(torch.zeros((), requires_grad=True)).backward()
        except BaseException:
            self._root.zero_grad()  # or the next pass would add to these
            raise
        finally:
            for each in self._sharded:
                each.reshard()


class _Unit(nn.Module):
    """Parts of a model as one module for FSDP, whose hooks run when this is called, not when the parts are."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        return value.clone()


class _Computation(nn.Module):
    """A function that computes with some modules, as a module for FSDP."""

    def __init__(self, compute: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(_no_view, self._compute(*args, **kwargs))


def _no_view(value: Any) -> Any:
    """The same values in a tensor that torch does not know as a view: FSDP warns of views, such as linear layers'."""
    if type(value) is not Tensor or not value._is_view():
        return value
    return unsafe_view(value, value.shape)


def _shard_part(part: nn.Module, stage: Stage, mesh: DeviceMesh) -> nn.Module:
    """Shards a part, and unshards it where it computes, but not where it passes on other stages' hidden states."""
    pass_on, sharded = part.forward, _Computation(part.forward, [part])
    # The gradient of an embedding, often the largest tensor, does not depend on its values.
    unit = _apply_fsdp(sharded, mesh, reshard_after_forward=True)
    unit.set_unshard_in_backward(not isinstance(part, nn.Embedding))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (sharded if stage.is_active else pass_on)(*args, **kwargs)

    part.forward = forward
    return sharded


def _join(stage: nn.Module, parts: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Puts a stage's parts under one root, so that the memory of one communication is freed when the next begins."""
    root = _Computation(stage.forward, parts)
    _apply_fsdp(root, mesh, reshard_after_forward=True)
    stage.forward = root.__call__
