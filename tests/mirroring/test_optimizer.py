"""The mirrored optimizer's step, schedulers and state, in every layout of the weights, against a plain loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.mirrored import MirroredStrategy

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.05, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),  # not elementwise: updated in one thread
}


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


class Net(nn.Module):
    """Tied weights, one layer that is never used and one that only replica 0's rows reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.unused, self.rare = nn.Linear(2, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tied(torch.tanh(self.first(x)))
        rare = x[:, 0] > 5
        return output + self.rare(x) * rare.unsqueeze(1) if bool(rare.any()) else output


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    made = [torch.randn(rows, 4, generator=random, dtype=torch.float64) for rows in (7, 8, 1, 5)]
    made[1][0, 0] = 9.0
    return made


def train(
    strategy: MirroredStrategy, mirrored: MirroredModule, optimizer: MirroredOptimizer, zero: bool = True
) -> None:
    def step(x: Tensor) -> None:
        if zero:
            optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, (batch,))


def train_alone(module: nn.Module, optimizer: torch.optim.Optimizer, zero: bool = True) -> None:
    for x in batches():
        if zero:
            optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()


def mirrored_pair(strategy: MirroredStrategy, make: MakeOptimizer) -> tuple[MirroredModule, MirroredOptimizer]:
    module = make_net()
    return strategy.mirror(module), strategy.mirror(make(module.parameters()))


@pytest.mark.parametrize("zero", [True, False], ids=["zero_grad", "gradients add up"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_one_device(name: str, zero: bool, layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    alone = make_net()
    plain = OPTIMIZERS[name](alone.parameters())
    mirrored, optimizer = mirrored_pair(strategy, OPTIMIZERS[name])

    train_alone(alone, plain, zero)
    train(strategy, mirrored, optimizer, zero)

    for duplicate in mirrored.copies:
        assert_close(duplicate.state_dict(), alone.state_dict())
    assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"])
    unused = [duplicate.get_parameter("unused.weight") for duplicate in mirrored.copies]
    assert all(parameter.grad is None for parameter in unused)


def test_a_replica_updates_its_slice_without_a_look_at_the_others(
    make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    """__setstate__ reads the state of all parameters, which other replicas are making at that moment."""
    strategy = make_strategy(3)
    mirrored, optimizer = mirrored_pair(strategy, OPTIMIZERS["nadam"])

    def walk(self: object, state: object) -> None:
        raise AssertionError("the state of all parameters was read")

    monkeypatch.setattr(torch.optim.NAdam, "__setstate__", walk)
    train(strategy, mirrored, optimizer)


@pytest.mark.parametrize("loaded_into", ["mirrored", "plain"])
def test_a_state_goes_on_where_it_was_saved(loaded_into: str, layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    through, through_optimizer = mirrored_pair(strategy, OPTIMIZERS["adam"])
    train(strategy, through, through_optimizer)
    saved = copy.deepcopy((through.state_dict(), through_optimizer.state_dict()))
    train(strategy, through, through_optimizer)

    resumed, optimizer = mirrored_pair(strategy, OPTIMIZERS["adam"])
    for _ in range(2):
        train(strategy, resumed, optimizer)  # to a state that is to be replaced
    resumed.load_state_dict(saved[0])
    (optimizer if loaded_into == "mirrored" else optimizer.plain).load_state_dict(saved[1])
    train(strategy, resumed, optimizer)

    for duplicate in resumed.copies:
        torch.testing.assert_close(duplicate.state_dict(), through.state_dict(), rtol=0, atol=0)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda update: 1 / (1 + update)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


@pytest.mark.parametrize("on", ["mirrored", "plain", "plain, before mirroring"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_without_a_warning(name: str, on: str, layout: str, make_strategy: MakeStrategy):
    def scheduled(step: Callable[[Any], None], optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        rates = []
        for x in batches():
            step(x)
            scheduler.step() if isinstance(scheduler, LRScheduler) and name != "ReduceLROnPlateau" else scheduler.step(
                1
            )
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    strategy = make_strategy(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone, module = make_net(), make_net()
        lone = OPTIMIZERS["sgd"](alone.parameters())

        def step_alone(x: Tensor) -> None:
            lone.zero_grad()
            alone(x).square().sum().backward()
            lone.step()

        expected = scheduled(step_alone, lone, SCHEDULERS[name](lone))
        plain = OPTIMIZERS["sgd"](module.parameters())
        early = SCHEDULERS[name](plain) if "before" in on else None
        mirrored, optimizer = strategy.mirror(module), strategy.mirror(plain)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            mirrored(x).square().sum().backward()
            optimizer.step()

        distribute = iter(strategy.distribute_dataset(batches()))
        scheduler = early or SCHEDULERS[name](optimizer if on == "mirrored" else plain)
        rates = scheduled(lambda _: strategy.run(step, (next(distribute),)), plain, scheduler)

    assert rates == pytest.approx(expected)
    for duplicate in mirrored.copies:
        assert_close(duplicate.state_dict(), alone.state_dict())


@pytest.mark.parametrize("where", ["mirrored", "plain", "global"])
def test_step_hooks_run_once_an_update(where: str, layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(4)
    mirrored, optimizer = mirrored_pair(strategy, OPTIMIZERS["sgd"])
    calls: list[object] = []

    def hook(hooked: object, args: object, kwargs: object) -> None:
        calls.append(hooked)

    if where == "global":
        handle = register_optimizer_step_post_hook(hook)
    else:
        handle = (optimizer if where == "mirrored" else optimizer.plain).register_step_post_hook(hook)
    train(strategy, mirrored, optimizer)
    handle.remove()

    assert len(calls) == len(batches())


def test_a_group_added_later_is_trained_too(layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    alone, module = make_net(), make_net()
    lone = torch.optim.Adam(alone.get_submodule("first").parameters(), 0.05)
    lone.add_param_group({"params": [alone.get_parameter("tied.bias")], "lr": 0.01})
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.Adam(module.get_submodule("first").parameters(), 0.05))
    optimizer.add_param_group({"params": [module.get_parameter("tied.bias")], "lr": 0.01})

    train_alone(alone, lone)
    train(strategy, mirrored, optimizer)

    for duplicate in mirrored.copies:
        assert_close(duplicate.state_dict(), alone.state_dict())


def test_a_group_added_to_the_plain_optimizer_is_not_forgotten_in_silence(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = make_net()
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.get_submodule("first").parameters(), 0.05))
    optimizer.plain.add_param_group({"params": [module.get_parameter("tied.bias")]})
    with pytest.raises(UsageError, match=r"has 3 parameters, but had 2 when it was mirrored; add groups with"):
        train(strategy, mirrored, optimizer)


def test_parameters_put_into_the_plain_optimizer_in_place_of_others_are_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.05))
    module[1] = nn.Linear(3, 1)
    optimizer.plain.param_groups[0]["params"] = list(module.parameters())

    def step(x: Tensor) -> None:
        mirrored(x).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"2 parameters \(the first of shape \(1, 3\)\).*make a new optimizer"):
        strategy.run(step, (PerReplica([torch.ones(1, 4), torch.ones(3, 4)]),))


def test_a_closure_is_evaluated_on_each_replica(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    mirrored, optimizer = strategy.mirror(module), strategy.mirror(torch.optim.SGD(module.parameters(), 1.0))

    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            loss: Tensor = mirrored(x).sum()
            loss.backward()
            return loss.detach()

        with torch.no_grad():
            return optimizer.step(closure)  # type: ignore[no-any-return]

    losses = strategy.run(step, (PerReplica([torch.ones(1, 1), torch.ones(3, 1)]),))

    assert [float(loss) for loss in losses] == [1.0, 3.0]
    assert module.weight.item() == 1.0 - 4.0


def test_what_cannot_be_mirrored_says_why(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"shape \(1, 2\) whose module is not mirrored; call module = strategy"):
        strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))
    mirrored = strategy.mirror(module)
    with pytest.raises(ConfigError, match="LBFGS evaluates its closure many times"):
        strategy.mirror(torch.optim.LBFGS(module.parameters()))
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))
    assert strategy.mirror(optimizer) is optimizer
    with pytest.raises(UsageError, match=r"step\(closure\) evaluates the closure in every replica; call it inside"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UsageError, match="a run of all replicas was asked for in a merge_call"):
        strategy.run(lambda: get_replica_context().merge_call(lambda _strategy: optimizer.step()))
    with pytest.raises(UsageError, match="mirrored by another strategy than the one that runs this replica"):
        make_strategy(2).run(optimizer.step)
    with pytest.raises(UsageError, match=r"load_state_dict .*outside strategy\.run"):
        strategy.run(lambda: optimizer.load_state_dict(optimizer.state_dict()))
    with pytest.raises(UsageError, match=r"save its state_dict\(\) instead"):
        copy.deepcopy(optimizer)
    assert mirrored.module is module


def test_zero_grad_is_the_replica_s_inside_and_everyone_s_outside(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy, OPTIMIZERS["sgd"])

    def step() -> None:
        mirrored(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        if here().replica_id_in_sync_group == 1:
            optimizer.zero_grad()

    strategy.run(step)
    first, second = (duplicate.get_parameter("first.weight") for duplicate in mirrored.copies)
    assert second.grad is None
    optimizer.zero_grad(set_to_none=False)
    assert float(first.grad.abs().sum()) == 0.0
    optimizer.zero_grad()
    assert first.grad is None
