"""Instance norms between convolutions have torch's gradients of the usual layout, also on shards of one row."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn

import lockstep as ls


def network(settings: dict[str, bool]) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6, **settings), nn.Tanh(), nn.Conv2d(6, 3, 1)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("settings", [{}, {"affine": True}])
@pytest.mark.parametrize(("replicas", "rows"), [(1, 1), (2, 2), (2, 3), (3, 4)])
def test_gradients_are_those_of_one_device(
    make_strategy: MakeStrategy, replicas: int, rows: int, settings: dict[str, bool]
) -> None:
    generator = torch.Generator().manual_seed(2)
    x, target = torch.randn(2, rows, 3, 4, 4, dtype=torch.float64, generator=generator)
    alone = network(settings)
    (alone(x) - target).square().mean().backward()

    strategy = make_strategy(replicas)
    module = strategy.mirror(copy.deepcopy(network(settings)))
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), lr=1.0))

    def step(x: Tensor, target: Tensor) -> None:
        losses = (module(x) - target).square().flatten(1).mean(1)
        ls.compute_average_loss(losses, global_batch_size=rows).backward()
        optimizer.step()

    before = [parameter.detach().clone() for parameter in module.parameters()]
    strategy.run(step, next(iter(strategy.distribute_dataset([(x, target)]))))
    for old, parameter, expected in zip(before, module.parameters(), alone.parameters(), strict=True):
        assert expected.grad is not None
        assert torch.allclose(old - parameter, expected.grad, rtol=1e-9, atol=1e-12)
