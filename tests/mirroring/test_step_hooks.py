"""What a program puts around an optimizer's step (hooks, a function in its place) acts once an update, as torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lockstep as ls
from lockstep.errors import UsageError

STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def rows(step: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def clamp(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)


def wrapped(optimizer: torch.optim.Optimizer, calls: list[int]) -> Callable[..., Any]:
    step = optimizer.step

    @functools.wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        result = step(*args, **kwargs)
        clamp(optimizer)
        return result

    return stepping


def replaced(optimizer: torch.optim.Optimizer, calls: list[int], _: ExitStack) -> None:
    optimizer.step = wrapped(optimizer, calls)  # type: ignore[method-assign]


def replaced_after_a_scheduler(optimizer: torch.optim.Optimizer, calls: list[int], _: ExitStack) -> StepLR:
    scheduler = StepLR(optimizer, 1, 0.5)
    optimizer.step = wrapped(optimizer, calls)  # type: ignore[method-assign]
    return scheduler


def replaced_before_a_scheduler(optimizer: torch.optim.Optimizer, calls: list[int], _: ExitStack) -> StepLR:
    stepping = wrapped(optimizer, calls)
    optimizer.step = MethodType(lambda _, *args: stepping(*args), optimizer)  # type: ignore[method-assign]
    return StepLR(optimizer, 1, 0.5)


def halves_gradients(optimizer: torch.optim.Optimizer, calls: list[int], _: ExitStack) -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls.append(1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)


def clamps_weights(optimizer: torch.optim.Optimizer, calls: list[int], _: ExitStack) -> None:
    optimizer.register_step_post_hook(lambda optimizer, *_: (calls.append(1), clamp(optimizer))[1])


def all_optimizers(optimizer: torch.optim.Optimizer, calls: list[int], stack: ExitStack) -> None:
    def count(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if stepped is optimizer:
            calls.append(1)

    stack.callback(register_optimizer_step_pre_hook(count).remove)
    stack.callback(register_optimizer_step_post_hook(lambda stepped, *_: clamp(stepped)).remove)


def replaced_for_its_class(optimizer: torch.optim.Optimizer, calls: list[int], stack: ExitStack) -> None:
    kind, step = type(optimizer), type(optimizer).step

    @functools.wraps(step)
    def stepping(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self is optimizer:
            calls.append(1)
        result = step(self, *args, **kwargs)
        clamp(self)
        return result

    stack.callback(setattr, kind, "step", step)
    kind.step = stepping  # type: ignore[method-assign]


AROUND: list[Callable[[torch.optim.Optimizer, list[int], ExitStack], Any]] = [
    *(replaced, replaced_after_a_scheduler, replaced_before_a_scheduler),
    *(halves_gradients, clamps_weights, all_optimizers, replaced_for_its_class),
]


def one_device(around: Callable[..., Any]) -> dict[str, Any]:
    module, calls = net(), list[int]()
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    with ExitStack() as stack:
        scheduler = around(optimizer, calls, stack)
        for number in range(STEPS):
            optimizer.zero_grad()
            (module(rows(number)).square().sum() / 7).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    assert len(calls) == STEPS
    return module.state_dict()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_it_acts_once_an_update_in_all_storages(
    around: Callable[..., Any], late: bool, make_strategy: MakeStrategy, layout: str
):
    strategy, users, calls = make_strategy(3), net(), list[int]()
    mirrored = strategy.mirror(users)
    plain = torch.optim.Adam(users.parameters(), 0.05)
    with ExitStack() as stack:
        scheduler = None if late else around(plain, calls, stack)
        optimizer = strategy.mirror(plain)
        scheduler = around(plain, calls, stack) if late else scheduler

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            ls.compute_average_loss(mirrored(x).square().sum(1)).backward()
            optimizer.step()

        for x in strategy.distribute_dataset([rows(number) for number in range(STEPS)]):
            strategy.run(step, (x,))
            if scheduler is not None:
                scheduler.step()

    assert len(calls) == STEPS
    for copy in mirrored.copies:
        torch.testing.assert_close(dict(copy.state_dict()), one_device(around), rtol=1e-12, atol=1e-14)


def test_when_it_is_gone_all_storages_go_on_alike(make_strategy: MakeStrategy, layout: str):
    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.Adam(users.parameters(), 0.05))
    plain = net()
    expected = torch.optim.Adam(plain.parameters(), 0.05)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        ls.compute_average_loss(mirrored(x).square().sum(1)).backward()
        optimizer.step()

    handle = optimizer.register_step_pre_hook(lambda *_: None)
    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(STEPS)])):
        if number == 2:
            handle.remove()
        strategy.run(step, (x,))
        expected.zero_grad()
        (plain(rows(number)).square().sum() / 7).backward()
        expected.step()
    for copy in mirrored.copies:
        torch.testing.assert_close(dict(copy.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-14)


def test_scaled_updates_call_it_once_too(make_strategy: MakeStrategy):
    calls = list[int]()

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, 0.01)
        replaced(optimizer, calls, ExitStack())
        return optimizer

    with make_strategy(2).scope():
        model = ls.Model(net().float())
        model.compile(make, "mse", precision="fp16")
        model.fit([(rows(number).float(), torch.zeros(7, 3)) for number in range(STEPS)], verbose=0)
    assert len(calls) == STEPS


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("around", AROUND)
def test_fit_calls_it_once_an_update(around: Callable[..., Any], replicas: int, make_strategy: MakeStrategy):
    calls, schedulers = list[int](), list[Any]()
    with ExitStack() as stack:

        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.Adam(parameters, 0.05)
            schedulers.append(around(optimizer, calls, stack))
            return optimizer

        with make_strategy(replicas).scope():
            model = ls.Model(net())
            model.compile(make, lambda outputs, _: outputs.square().sum(1))
            for number in range(STEPS):
                model.fit([(rows(number), torch.zeros(7))], verbose=0)
                for scheduler in filter(None, schedulers):
                    scheduler.step()
    assert len(calls) == STEPS
    torch.testing.assert_close(model.state_dict(), one_device(around), rtol=1e-12, atol=1e-14)


def test_in_place_of_the_mirrored_step_fit_refuses_it_but_not_a_scheduler_s(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with strategy.scope():
        model = ls.Model(users := net())
        optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.1))
        StepLR(optimizer, 1, 0.5)
        model.compile(optimizer, lambda outputs, _: outputs.square().sum(1))
        batch = rows(0), torch.zeros(7)
        model.fit([batch], verbose=0)
        step = optimizer.step
        optimizer.step = lambda *args: step(*args)  # type: ignore[method-assign]
        with pytest.raises(UsageError, match=r"step of a mirrored optimizer was replaced.*optimizer\.plain\.step"):
            model.fit([batch], verbose=0)


def test_a_zero_grad_of_its_own_is_warned_of(make_strategy: MakeStrategy):
    strategy, users = make_strategy(2), net()
    mirrored = strategy.mirror(users)
    optimizer = torch.optim.SGD(mirrored.parameters(), 0.1)
    optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="zero_grad was replaced"):
        strategy.mirror(optimizer)


def second_after(optimizer: torch.optim.Optimizer, head: nn.Module, how: str) -> None:
    """Steps another optimizer over the head around each step of ``optimizer``."""
    other = torch.optim.SGD(head.parameters(), 0.05)

    def step(*_: Any) -> None:
        other.step()
        other.zero_grad()

    if how == "replaced step":
        inner = optimizer.step

        def stepping(*args: Any, **named: Any) -> Any:
            result = inner(*args, **named)
            step()
            return result

        optimizer.step = stepping  # type: ignore[method-assign]
    else:
        register = optimizer.register_step_pre_hook if how == "pre hook" else optimizer.register_step_post_hook
        register(step)


@pytest.mark.parametrize("how", ["pre hook", "post hook", "replaced step"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_another_optimizer_over_weights_that_it_does_not_hold_is_refused_by_fit(
    how: str, replicas: int, make_strategy: MakeStrategy
):
    strategy = make_strategy(replicas)
    with strategy.scope():
        module = net()
        optimizer = torch.optim.SGD(module[0].parameters(), 0.1)
        second_after(optimizer, module[2], how)
        model = ls.Model(module)
        model.compile(optimizer, "mse")
    before = {name: value.clone() for name, value in module[2].state_dict().items()}
    with (
        pytest.warns(UserWarning, match=r"tensors of weights that the optimizer does not hold have gradients"),
        pytest.raises(UsageError, match=r"SGD.step was called around .* give compile one optimizer over all weights"),
    ):
        model.fit([(rows(0), rows(0)[:, :3])], verbose=0)
    torch.testing.assert_close(dict(module[2].state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_optimizer_in_a_loop_is_that_of_one_device_or_refused(replicas: int, make_strategy: MakeStrategy):
    def step(mirrored: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        ls.compute_average_loss(mirrored(x).square().mean(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    alone = net()
    expected = torch.optim.SGD(alone[0].parameters(), 0.1)
    second_after(expected, alone[2], "post hook")
    strategy = make_strategy(replicas)
    module = net()
    mirrored = strategy.mirror(module)
    plain = torch.optim.SGD(module[0].parameters(), 0.1)
    second_after(plain, module[2], "post hook")
    optimizer = strategy.mirror(plain)
    for number in range(STEPS):
        alone(rows(number)).square().mean().backward()
        expected.step()
        expected.zero_grad()
        shards = next(iter(strategy.distribute_dataset([rows(number)])))
        if replicas > 1:
            with (
                pytest.warns(UserWarning, match="does not hold have gradients"),
                pytest.raises(UsageError, match=r"mirror both in a loop of your own"),
            ):
                strategy.run(step, (mirrored, optimizer, shards))
            return
        strategy.run(step, (mirrored, optimizer, shards))
    torch.testing.assert_close(dict(module.state_dict()), dict(alone.state_dict()), rtol=1e-12, atol=1e-14)
