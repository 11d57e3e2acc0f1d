"""torch.func in a step: what it gives on one device, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.autograd import forward_ad

import lockstep as ls
from lockstep.errors import UsageError
from lockstep.strategies.mirrored import MirroredStrategy


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def rows() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(1))


def gathered(strategy: MirroredStrategy, step: Callable[[Tensor], Tensor]) -> Tensor:
    (x,) = strategy.distribute_dataset([rows()])
    result: Tensor = strategy.gather(strategy.run(step, (x,)), 0)
    return result


def test_gradients_of_each_row(make_strategy: MakeStrategy):
    def of_each(module: Any, x: Tensor) -> Tensor:
        weights = {name: value.detach() for name, value in module.named_parameters()}

        def loss(weights: Any, row: Tensor) -> Tensor:
            return torch.func.functional_call(module, weights, (row[None],)).square().sum()

        found: Tensor = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)["0.weight"]
        return found

    strategy = make_strategy(3)
    mirrored = strategy.mirror(net())
    torch.testing.assert_close(gathered(strategy, lambda x: of_each(mirrored, x)), of_each(net(), rows()))


def test_an_ensemble_of_stacked_modules(make_strategy: MakeStrategy):
    def of_all(modules: Any, x: Tensor) -> Tensor:
        weights, buffers = torch.func.stack_module_state(modules)

        def call(weights: Any, buffers: Any) -> Any:
            return torch.func.functional_call(modules[0], (weights, buffers), (x,))

        return torch.func.vmap(call)(weights, buffers).mean(0).detach()

    strategy = make_strategy(3)
    mirrored = [strategy.mirror(net(seed)) for seed in range(3)]
    torch.testing.assert_close(
        gathered(strategy, lambda x: of_all(mirrored, x)), of_all([net(seed) for seed in range(3)], rows())
    )


def test_jacobians_of_reverse_mode(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(net())
    torch.testing.assert_close(
        gathered(strategy, torch.func.vmap(torch.func.jacrev(mirrored))),
        torch.func.vmap(torch.func.jacrev(net()))(rows()),
    )


def dual(module: Any, x: Tensor) -> None:
    with forward_ad.dual_level():
        module(forward_ad.make_dual(x, torch.ones_like(x)))


def jvp(module: Any, x: Tensor) -> None:
    torch.func.jvp(module, (x,), (torch.ones_like(x),))


def hessian(module: Any, x: Tensor) -> None:
    torch.func.hessian(lambda x: module(x).sum())(x)


@pytest.mark.parametrize("use", [dual, jvp, hessian])
def test_forward_mode_is_refused(use: Callable[[Any, Tensor], None], make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(net())
    late = [False]

    def step(x: Tensor) -> None:
        if late[0]:
            use(mirrored, x)

    with pytest.raises(UsageError, match=r"forward-mode AD.*jacrev"):
        strategy.run(lambda x: use(mirrored, x), (rows(),))
    strategy.run(step, (rows(),))
    late[0] = True
    with pytest.raises((UsageError, RuntimeError), match=r"[Ff]orward.*AD"):
        strategy.run(step, (rows(),))
    strategy.run(lambda: None)


def test_one_replica_may_use_it(make_strategy: MakeStrategy):
    strategy = make_strategy(1)
    mirrored = strategy.mirror(net())
    for use in (dual, jvp, hessian):
        strategy.run(lambda use=use: use(mirrored, rows()))


def ensemble(models: Any, base: nn.Module, x: Tensor) -> Tensor:
    weights, buffers = torch.func.stack_module_state(models)

    def one(weights: Any, buffers: Any) -> Any:
        return torch.func.functional_call(base, (weights, buffers), (x,))

    result: Tensor = torch.func.vmap(one)(weights, buffers)
    return result.transpose(0, 1)


def test_an_ensemble_called_through_a_module_on_meta(make_strategy: MakeStrategy):
    expected = ensemble([net(0), net(1)], net().to("meta"), rows())
    strategy = make_strategy(2)
    mirrored = [strategy.mirror(net(seed)) for seed in (0, 1)]
    bases = ls.PerReplica([net().to("meta"), net().to("meta")])

    def with_its_own(x: Tensor) -> Tensor:
        return ensemble(mirrored, copy.deepcopy(mirrored[0].module).to("meta"), x)

    torch.testing.assert_close(gathered(strategy, with_its_own), expected)
    (x,) = strategy.distribute_dataset([rows()])
    outputs = strategy.run(lambda base, x: ensemble(mirrored, base, x), (bases, x))
    torch.testing.assert_close(strategy.gather(outputs, 0), expected)


def test_weights_set_on_one_module_by_several_replicas_are_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored, base = [strategy.mirror(net(seed)) for seed in (0, 1)], net().to("meta")
    with pytest.raises(UsageError, match=r"functional_call on one Sequential in replicas \d and \d.*PerReplica"):
        gathered(strategy, lambda x: ensemble(mirrored, base, x))


def test_one_replica_may_set_weights_on_a_module_from_outside(make_strategy: MakeStrategy):
    strategy, base = make_strategy(1), net().to("meta")
    mirrored = [strategy.mirror(net(seed)) for seed in (0, 1)]
    torch.testing.assert_close(
        gathered(strategy, lambda x: ensemble(mirrored, base, x)), ensemble([net(0), net(1)], base, rows())
    )
