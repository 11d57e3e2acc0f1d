"""Modules of which one is in another, or that share a layer or a weight, trained as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError

STEPS = 3


def rows() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(3))


class Tied(nn.Module):
    """One weight, under another name, in a module of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.T)


def two_heads() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None, track_running_stats=False))
    return nn.Sequential(trunk[0], nn.Tanh(), nn.Linear(5, 2)), nn.Sequential(trunk[0], nn.Linear(5, 3))


def a_part_and_the_whole() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    part = nn.Linear(4, 4)
    return part, nn.Sequential(part, nn.Tanh(), nn.Linear(4, 2))


def the_whole_and_a_part() -> tuple[nn.Module, nn.Module]:
    part, whole = a_part_and_the_whole()
    return whole, part


def one_weight() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    return first, Tied(first.weight)


def unique(*modules: nn.Module) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


@pytest.mark.parametrize("make", [two_heads, a_part_and_the_whole, the_whole_and_a_part, one_weight])
def test_gradients_of_both_modules_are_summed(
    make: Callable[[], tuple[nn.Module, nn.Module]], layout: str, make_strategy: MakeStrategy
):
    plain = make()
    own = torch.optim.SGD(unique(*plain), 0.1, momentum=0.9)
    for _ in range(STEPS):
        own.zero_grad()
        (plain[0](rows()).square().sum() + plain[1](rows()).abs().sum()).backward()
        own.step()

    strategy, users = make_strategy(3), make()
    first, second = strategy.mirror(users[0]), strategy.mirror(users[1])
    optimizer = strategy.mirror(torch.optim.SGD(unique(*users), 0.1, momentum=0.9))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (first(x).square().sum() + second(x).abs().sum()).backward()
        optimizer.step()

    for x in strategy.distribute_dataset([rows()] * STEPS):
        strategy.run(step, (x,))

    torch.testing.assert_close(unique(*users), unique(*plain))
    for copies in (first.copies, second.copies):
        for duplicate in copies[1:]:
            torch.testing.assert_close(list(duplicate.parameters()), list(copies[0].parameters()))


def test_a_layer_in_two_modules_has_one_copy_a_replica(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    first, second = map(strategy.mirror, two_heads())
    for one, other in zip(first.copies, second.copies, strict=True):
        assert one.get_submodule("0") is other.get_submodule("0")


def test_a_mirrored_module_in_another_says_what_to_put_there(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    trunk = strategy.mirror(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"Sequential has a mirrored module in it, as '0'.*mirrored\.module"):
        strategy.mirror(nn.Sequential(trunk, nn.Linear(2, 1)))
    assert strategy.mirror(nn.Sequential(trunk.module, nn.Linear(2, 1))).copies[1].get_submodule("0") is trunk.copies[1]
