"""Scripted modules in a mirrored one: they may be read, and are not trained."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.errors import UsageError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()).eval()


def scripted(*, trained: bool = True) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: nn.Module = torch.jit.script(net().requires_grad_(trained))
    return made


def rows() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(1))


def test_a_frozen_one_gives_features(layout: str, make_strategy: MakeStrategy):
    def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()

    torch.manual_seed(2)
    plain = nn.Sequential(net().requires_grad_(False), nn.Linear(6, 2))
    torch.manual_seed(2)
    net()
    users = nn.Sequential(scripted(trained=False), nn.Linear(6, 2))
    users[1].load_state_dict(plain[1].state_dict())
    own = torch.optim.SGD(plain[1].parameters(), 0.1)
    strategy = make_strategy(3)
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users[1].parameters(), 0.1))
    for x in strategy.distribute_dataset([rows()] * 4):
        train(plain, own, rows())
        strategy.run(train, (mirrored, optimizer, x))

    torch.testing.assert_close(users[1].state_dict(), plain[1].state_dict())


def test_one_that_is_trained_is_refused(make_strategy: MakeStrategy):
    with pytest.raises(UsageError, match=r"Sequential has a scripted module .*requires_grad_\(False\)"):
        make_strategy(2).mirror(nn.Sequential(scripted(), nn.Linear(6, 2)))
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Sequential(nn.Linear(4, 4)))
    mirrored.append(scripted())
    with pytest.raises(UsageError, match="scripted"):
        strategy.run(lambda: None)
    assert make_strategy(1).mirror(scripted())
