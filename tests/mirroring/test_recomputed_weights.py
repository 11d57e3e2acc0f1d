"""Modules whose weights a hook computes from others at every call: the old weight_norm and spectral_norm, pruning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.nn.utils import prune


def weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(module)


def spectral_norm(module: nn.Module) -> None:
    torch.nn.utils.spectral_norm(module)


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", amount=0.5)


def pruned_after_a_call(module: nn.Module) -> None:
    pruned(module)
    module(torch.ones(2, module.weight.shape[1]))  # type: ignore[union-attr, index]


def parametrized(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(module)


def net(change: Callable[[nn.Module], None]) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    change(module[0])
    change(module[2])
    return module


def rows(seed: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("change", [weight_norm, spectral_norm, pruned, pruned_after_a_call, parametrized])
def test_trained_as_on_one_device(change: Callable[[nn.Module], None], layout: str, make_strategy: MakeStrategy):
    plain = net(change)
    own = torch.optim.SGD(plain.parameters(), 0.1)
    for seed in range(3):
        own.zero_grad()
        plain(rows(seed)).square().sum().backward()
        own.step()

    strategy, users = make_strategy(3), net(change)
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.1))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for x in strategy.distribute_dataset([rows(seed) for seed in range(3)]):
        strategy.run(step, (x,))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(mirrored(rows(9)), plain(rows(9)))


def test_features_that_a_call_left_do_not_hinder_the_copy(make_strategy: MakeStrategy):
    module = nn.Linear(3, 1)
    module.register_forward_hook(lambda part, _, output: setattr(part, "kept", [output]))
    module(torch.ones(1, 3))
    mirrored = make_strategy(3).mirror(module)
    for duplicate in mirrored.copies[1:]:
        kept = duplicate.kept[0]  # type: ignore[index, union-attr]
        assert not kept.requires_grad
        torch.testing.assert_close(kept, module.kept[0].detach())  # type: ignore[index, union-attr]


@pytest.mark.parametrize("change", [weight_norm, spectral_norm, pruned, parametrized])
def test_given_after_mirroring(change: Callable[[nn.Module], None], layout: str, make_strategy: MakeStrategy):
    def begin() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def make(module: nn.Module) -> torch.optim.Optimizer:
        torch.manual_seed(1)
        change(module[0])  # type: ignore[index]
        return torch.optim.SGD(module.parameters(), 0.1)

    plain = begin()
    plain(rows(0)).square().sum().backward()
    plain.zero_grad()
    own = make(plain)
    for seed in range(1, 4):
        own.zero_grad()
        plain(rows(seed)).square().sum().backward()
        own.step()

    strategy, users = make_strategy(3), begin()
    mirrored = strategy.mirror(users)
    strategy.run(lambda: mirrored(rows(0)).square().sum().backward())
    mirrored.zero_grad()
    optimizer = strategy.mirror(make(users))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for x in strategy.distribute_dataset([rows(seed) for seed in range(1, 4)]):
        strategy.run(step, (x,))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))
    if change is pruned:
        prune.remove(users[0], "weight")
    if change is parametrized:
        nn.utils.parametrize.remove_parametrizations(users[0], "weight")
    mirrored.eval()
    expected = plain.eval()(rows(9))
    for output in (mirrored(rows(9)), *strategy.local_results(strategy.run(mirrored, (rows(9),)))):
        torch.testing.assert_close(output, expected)
