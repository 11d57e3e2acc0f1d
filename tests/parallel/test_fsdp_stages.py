"""Lending by parts, on a mesh of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.errors import ConfigError
from lockstep.parallel.fsdp import StageWeights, shard_stages
from lockstep.parallel.pipeline_config import choose_pipeline_config
from lockstep.parallel.pipeline_stage import ActiveStage, Stage


class Sees(nn.Linear):
    """Notes whether its weights are whole when it computes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.whole: list[bool] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.whole.append(not isinstance(self.weight, DTensor))
        return super().forward(value)


class Watches(Sees):
    """Lets through, and notes whether the weights of another are whole meanwhile."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = (other,)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.whole.append(not isinstance(self.others[0].weight, DTensor))
        return value


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def around(weights: StageWeights | None, *, backward: bool) -> AbstractContextManager[None]:
    return nullcontext() if weights is None else weights.during(backward=backward)


def make(
    mesh: DeviceMesh, schedule: str, *, tied: bool = False
) -> tuple[list[Sees], list[Stage], Watches, StageWeights | None]:
    """Two stages of one worker with a layer each, and what the second does in the first one's turn."""
    layers = [Sees(), Sees()]
    if tied:
        layers[1].weight = layers[0].weight
    model, active = nn.Module(), ActiveStage()
    model.layers = nn.ModuleList(layers)
    watch = Watches(layers[1])
    active.restrict(layers[1], 3, watch)
    stages = [
        Stage(model, model, [layer], number=number, stages=4, active=active)
        for number, layer in zip((0, 3), layers, strict=True)
    ]
    borrowing = shard_stages(model, stages, choose_pipeline_config(schedule, 4, 2), mesh)  # type: ignore[arg-type]
    return layers, stages, watch, borrowing


def test_a_part_is_whole_while_it_computes_for_its_own_stage_alone(mesh: DeviceMesh):
    layers, stages, watch, borrowing = make(mesh, "interleaved")

    with around(borrowing, backward=True):
        value = torch.ones(2, 4)
        for stage in stages:
            stage.activate()
            for layer in layers[stage.number // 3 :]:
                value = layer(value)
        value.sum().backward()

    assert [layer.whole for layer in layers] == [[True], [True]]
    assert watch.whole == [False]
    assert all(isinstance(layer.weight, DTensor) and layer.weight.grad is not None for layer in layers)


@pytest.mark.parametrize("tied", [False, True])
def test_all_parts_are_whole_during_a_pass_whose_backward_is_in_two(mesh: DeviceMesh, tied: bool):
    layers, stages, watch, borrowing = make(mesh, "zero_bubble_v", tied=tied)

    with around(borrowing, backward=True):
        stages[0].activate()
        layers[1](layers[0](torch.ones(2, 4))).sum().backward()
        assert layers[0].weight.grad.tolist() == [[2.0] * 4] * 4

    with around(borrowing, backward=False):
        assert not any(isinstance(each, DTensor) for layer in layers for each in layer.parameters())
    assert layers[0].whole == watch.whole == [True]
    assert all(isinstance(layer.weight, DTensor) for layer in layers)
    assert layers[0].weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4
    assert (layers[0].weight is layers[1].weight) is tied


def test_a_pass_that_fails_leaves_neither_weights_nor_gradients(mesh: DeviceMesh):
    layers, stages, _, borrowing = make(mesh, "zero_bubble")

    stages[0].activate()
    with suppress(KeyError), around(borrowing, backward=True):
        layers[0](torch.ones(2, 4)).sum().backward()
        raise KeyError
    with around(borrowing, backward=True):
        assert layers[0].weight.grad is None

    assert isinstance(layers[0].weight, DTensor)


def test_parts_that_have_a_weight_in_common_are_refused_where_each_is_lent_its_own(mesh: DeviceMesh):
    with pytest.raises(ConfigError, match=r"have a weight in common, .* choose shard_optimizer=True, or schedule="):
        make(mesh, "interleaved", tied=True)
