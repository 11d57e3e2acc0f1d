"""Full sharding in a pipeline: replicas share the weights of their stages, and borrow them while microbatches pass.

    gpipe, 1f1b,    a microbatch in layer k: gather -> forward -> free ... gather -> backward -> sum gradients, free
    interleaved

    zero_bubble,    gather all layers -> forward, inputs', weights' passes of all microbatches -> sum gradients, free
    zero_bubble_v   a weights' pass may come long after the others, and knows of a layer's weights but not of the layer

The first holds a layer's weights and gradients at a time, as without a pipeline, and sends as much for each microbatch.
The second holds a stage's for the length of a pass, and sends once. torch's schedules are told of neither: they would
keep everything gathered from a stage's first microbatch on, whatever the schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lockstep._torch_compat import tree_map, unsafe_view
from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import PipelineConfig
from lockstep.parallel.pipeline_stage import Stage


def shard_fully(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every parameter over the workers of ``mesh``, in place. All must call it; nothing is sent.

    Afterwards all of them must take part in each forward and backward pass, whether or not they have rows.

    Raises:
        ConfigError: a parameter is a single number.
    """
    check_shardable(module)
    for unit in [*units_of(module), module]:
        # The whole too: what is not in a layer would else stay gathered after an evaluation.
        apply_fsdp(unit, mesh, reshard_after_forward=True)


def apply_fsdp(unit: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> FSDPModule:
    """Torch's ``fully_shard``, with gradients summed over ``mesh`` instead of averaged."""
    made = fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    return made


def check_shardable(module: nn.Module) -> None:
    """Checks that a module can be sharded.

    Raises:
        ConfigError: a parameter is a single number.
    """
    for name, parameter in module.named_parameters():
        if not parameter.ndim:
            raise ConfigError(f"{name} is a single number, which cannot be sharded; choose shard_optimizer=True alone")


def units_of(module: nn.Module) -> list[nn.Module]:
    """The modules that are gathered and freed at a time: the members of the outermost module lists, usually the layers.

    One that has a parameter in common with another module is left out, and gathered with the rest.
    """
    return apart(_members(module), module)


def apart(parts: Iterable[nn.Module], module: nn.Module) -> list[nn.Module]:
    """The parts of a module that have parameters, none of them in common with another part."""
    names = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    return [part for part in parts if _is_apart(part, names)]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield child
        else:
            yield from _members(child)


def _is_apart(unit: nn.Module, names: Counter[int]) -> bool:
    own = Counter(id(each) for _, each in unit.named_parameters(remove_duplicate=False))
    return bool(own) and all(names[each] == count for each, count in own.items())


_DIVIDED = ("zero_bubble", "zero_bubble_v")
"""Schedules whose backward passes are in two."""


class StageWeights(ABC):
    """When a worker's stages have the weights of which it holds a share."""

    @abstractmethod
    def during(self, *, backward: bool) -> AbstractContextManager[None]:
        """Goes around a pass of a shard through the stages. All who share must make it, with or without rows.

        Args:
            backward: whether gradients are made; afterwards each worker has the sums for its share.
        """


def shard_stages(
    module: nn.Module, stages: Sequence[Stage], pipelining: PipelineConfig, mesh: DeviceMesh
) -> StageWeights:
    """Leaves each worker of ``mesh`` its share of a worker's stages, in place. All must call it; nothing is sent.

    Args:
        module: the model, cut down to the stages.
        stages: this worker's.
        pipelining: the schedule.
        mesh: the workers that hold the same stages.

    Raises:
        ConfigError: a parameter that is a single number, or that two parts of one worker have in common.
    """
    check_shardable(module)
    if pipelining.schedule in _DIVIDED:
        return _ByPass(module, stages, mesh)
    return _ByLayer(module, stages, mesh)


class _ByLayer(StageWeights):
    """Each part of a stage is gathered when it is called, and again before its backward pass."""

    def __init__(self, module: nn.Module, stages: Sequence[Stage], mesh: DeviceMesh) -> None:
        for stage in stages:
            parts = [part for part in stage.parts if any(True for _ in part.parameters())]
            if len(apart(parts, module)) < len(parts):
                raise ConfigError(
                    "two parts of a worker's stages have a weight in common, which shard_parameters=True lends to one "
                    'at a time; choose shard_optimizer=True, or schedule="zero_bubble"'
                )
            _lend_together(stage, [_lend(part, stage, mesh) for part in parts], mesh)

    @contextmanager
    def during(self, *, backward: bool) -> Iterator[None]:
        """All of it is done by torch's hooks on the parts."""
        yield


class _ByPass(StageWeights):
    """All parts are gathered before the first microbatch comes, and given back when the last one is through."""

    def __init__(self, module: nn.Module, stages: Sequence[Stage], mesh: DeviceMesh) -> None:
        layers = {id(layer) for layer in units_of(module)}
        parts = [part for stage in stages for part in stage.parts]
        self._units = [_Held([part]) for part in parts if id(part) in layers]
        rest = [part for part in parts if id(part) not in layers]
        self._all = _Held([*self._units, *rest])  # weights that first and last stage have in common are one here
        self._sharers = [apply_fsdp(each, mesh, reshard_after_forward=False) for each in (*self._units, self._all)]

    @contextmanager
    def during(self, *, backward: bool) -> Iterator[None]:
        """Inside the block the weights are plain parameters, whole, and so are their gradients."""
        self._gather()
        try:
            yield
            if backward:
                self._sum()
        except BaseException:
            self._all.zero_grad()  # or the next pass would add to what there is
            raise
        finally:
            for each in self._sharers:
                each.reshard()

    def _gather(self) -> None:
        with torch.no_grad():
            self._all(torch.zeros(()))  # torch learns in the first forward pass which one stands above the others
        for each in self._sharers:
            each.unshard()

    def _sum(self) -> None:
        """A backward pass through nothing, at whose end torch sums the gradients that are there."""
        self._all(torch.zeros((), requires_grad=True)).backward()


class _Held(nn.Module):
    """Parts of a model as torch's FSDP sees them: its hooks run when this is called, not when they are."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        """The value; nothing is computed."""
        return value.clone()


class _Lent(nn.Module):
    """What computes with some modules, as torch's FSDP sees it."""

    def __init__(self, compute: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What is computed."""
        return tree_map(_no_view, self._compute(*args, **kwargs))


def _no_view(value: Any) -> Any:
    """The same numbers in a tensor that torch does not know for a view: FSDP warns of each, as of linear layers'."""
    if type(value) is not Tensor or not value._is_view():
        return value
    return unsafe_view(value, value.shape)


def _lend(part: nn.Module, stage: Stage, mesh: DeviceMesh) -> nn.Module:
    """Has a part gather its weights where it works, and not where it lets other stages' hidden states through."""
    through, lent = part.forward, _Lent(part.forward, [part])
    sharer = apply_fsdp(lent, mesh, reshard_after_forward=True)
    # The gradient of a table of words, often the largest tensor, does not depend on what is in it.
    sharer.set_unshard_in_backward(not isinstance(part, nn.Embedding))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (lent if stage.has_turn else through)(*args, **kwargs)

    part.forward = forward
    return lent


def _lend_together(stage: nn.Module, parts: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Has all that is lent in a stage known to each other, so that what was sent is freed as the next is sent."""
    together = _Lent(stage.forward, parts)
    apply_fsdp(together, mesh, reshard_after_forward=True)
    stage.forward = together.__call__
