"""Hooks that the user registers on parameters, before or after mirroring: they see what they see on one device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import UsageError
from lockstep.mirroring.optim.step import Totals

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def rows(step: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(step))


def mask(module: Any, seen: list[Tensor]) -> RemovableHandle:
    kept = torch.tensor([[1.0], [0.0], [1.0], [0.0], [1.0]])
    return module[0].weight.register_hook(lambda gradient: gradient * kept)


def limit(module: Any, seen: list[Tensor]) -> RemovableHandle:
    return module[2].weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


def two_of_them(module: Any, seen: list[Tensor]) -> RemovableHandle:
    module[2].bias.register_hook(lambda gradient: gradient.sign())
    return module[2].bias.register_hook(lambda gradient: gradient * 2 + 0.1)


def look(module: Any, seen: list[Tensor]) -> RemovableHandle:
    return module[2].weight.register_hook(lambda gradient: seen.append(gradient.norm()))


def limit_in_place(module: Any, seen: list[Tensor]) -> RemovableHandle:
    def limited(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.05, 0.05)
        seen.append(parameter.grad.norm())

    return module[0].weight.register_post_accumulate_grad_hook(limited)


def drop(module: Any, seen: list[Tensor]) -> RemovableHandle:
    return module[0].bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))


HOOKS: list[Callable[[Any, list[Tensor]], RemovableHandle]] = [mask, limit, two_of_them, look, limit_in_place, drop]


class Registering:
    """Registers a hook before one step, and removes it before another."""

    def __init__(self, module: nn.Module, register: Callable[[Any, list[Tensor]], RemovableHandle], at: int) -> None:
        self.seen: list[Tensor] = []
        self._module = module
        self._register = partial(register, module, self.seen)
        self._at = at

    def before(self, step: int) -> None:
        if step == self._at:
            self._handle = self._register()
        if step == STEPS - 1:
            self._handle.remove()


def train_plain(registering: Registering, module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    for number in range(STEPS):
        registering.before(number)
        optimizer.zero_grad()
        module(rows(number)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("register", HOOKS)
def test_they_see_the_sum_once(
    register: Callable[[Any, list[Tensor]], RemovableHandle], at: int, layout: str, make_strategy: MakeStrategy
):
    plain = net()
    expected = Registering(plain, register, at)
    train_plain(expected, plain)

    strategy, users = make_strategy(3), net()
    registering = Registering(users, register, at)
    if at == 0:
        registering.before(0)
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.05, momentum=0.9))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(STEPS)])):
        if number:
            registering.before(number)
        strategy.run(step, (x,))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(registering.seen, expected.seen)


@pytest.mark.parametrize("register", [mask, limit, limit_in_place])
def test_gradients_that_a_step_reads_have_passed_through_them(
    register: Callable[[Any, list[Tensor]], RemovableHandle], make_strategy: MakeStrategy
):
    def train(module: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()

    plain = net()
    register(plain, [])
    own = torch.optim.SGD(plain.parameters(), 0.5)
    for number in range(STEPS):
        train(plain, own, rows(number))

    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.5))
    register(users, [])
    for x in strategy.distribute_dataset([rows(number) for number in range(STEPS)]):
        strategy.run(train, (mirrored, optimizer, x))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))


def test_sums_that_are_taken_apart_have_passed_through_them(layout: str, make_strategy: MakeStrategy):
    plain = net()
    limit(plain, [])
    own = torch.optim.SGD(plain.parameters(), 0.5)
    plain(rows(0)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    own.step()

    strategy, users = make_strategy(3), net()
    limit(users, [])
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.5))

    def backward(x: Tensor) -> None:
        mirrored(x).square().sum().backward()
        optimizer.sum_gradients()

    (x,) = strategy.distribute_dataset([rows(0)])
    strategy.run(backward, (x,))
    torch.testing.assert_close(optimizer.clip_sums(0.1), norm)
    optimizer.step()

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))


def test_several_backward_passes_are_refused(make_strategy: MakeStrategy):
    strategy, users = make_strategy(3), net()
    limit(users, [])
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.5))

    def step(x: Tensor, first: bool) -> None:
        if first:
            mirrored(x).abs().sum().backward()
            optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        if not first:
            mirrored(x).square().sum().backward()
        optimizer.step()

    (x,) = strategy.distribute_dataset([rows(0)])
    strategy.run(step, (x, True))
    optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"2 backward passes.*hook \(limit.*optimizer\.sum_gradients"):
        strategy.run(step, (x, False))


def test_without_a_mirrored_optimizer_they_are_refused(make_strategy: MakeStrategy):
    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)
    limit(users, [])

    def step(x: Tensor) -> None:
        mirrored(x).square().sum().backward()

    (x,) = strategy.distribute_dataset([rows(0)])
    with torch.no_grad():
        strategy.run(mirrored, (x,))
    with pytest.raises(UsageError, match=r"hook \(limit.*strategy\.mirror\(optimizer\)"):
        strategy.run(step, (x,))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_registered_in_a_step_they_are_refused(kind: str, make_strategy: MakeStrategy):
    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)

    def step() -> None:
        getattr(mirrored[0].weight, kind)(lambda _: None)

    with pytest.raises(UsageError, match=r"hook on '0\.weight'.*outside strategy\.run"):
        strategy.run(step)


def test_a_gradient_asked_for_past_them_is_refused(make_strategy: MakeStrategy):
    strategy, users = make_strategy(3), net()
    limit(users, [])
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.5))

    def step(x: Tensor) -> None:
        torch.autograd.grad(mirrored(x).sum(), list(mirrored.parameters()))
        optimizer.zero_grad()

    with pytest.raises(UsageError, match=r"torch\.autograd\.grad for the gradient of '2\.weight'"):
        strategy.run(step, (rows(0),))


def test_outside_replicas_they_act_as_ever(make_strategy: MakeStrategy):
    strategy, users, plain = make_strategy(3), net(), net()
    mirrored = strategy.mirror(users)
    for module in (users, plain):
        limit(module, [])
        limit_in_place(module, [])
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.5))
    strategy.run(lambda x: mirrored(x).square().sum().backward(), (rows(0),))
    optimizer.zero_grad()

    for module in (users, plain):
        for number in range(2):
            module(rows(number)).square().sum().backward()
    torch.testing.assert_close([each.grad for each in users.parameters()], [each.grad for each in plain.parameters()])


def test_fit_gives_them_the_gradient_of_the_mean(make_strategy: MakeStrategy):
    targets = torch.randn(14, 3, generator=torch.Generator().manual_seed(9))
    inputs = torch.cat([rows(0), rows(1)])
    plain = net()
    limit(plain, [])
    own = torch.optim.SGD(plain.parameters(), 0.5)
    for at in (0, 8):
        own.zero_grad()
        nn.functional.mse_loss(plain(inputs[at : at + 8]), targets[at : at + 8]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        own.step()

    users = net()
    with make_strategy(3).scope():
        model = ls.Model(users)
        model.compile(
            optimizer=torch.optim.SGD(users.parameters(), 0.5), loss=nn.MSELoss(reduction="none"), clip_norm=0.1
        )
    limit(users, [])
    model.fit([(inputs[:8], targets[:8]), (inputs[8:], targets[8:])], verbose=0)

    torch.testing.assert_close(dict(users.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("register", [mask, limit])
def test_a_scaled_update_gives_them_the_gradient_without_the_scale(
    register: Callable[[Any, list[Tensor]], RemovableHandle], layout: str, make_strategy: MakeStrategy
):
    plain = net()
    register(plain, [])
    own = torch.optim.SGD(plain.parameters(), 0.5)
    plain(rows(0)).square().sum().div(7.0).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    own.step()

    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)
    register(users, [])
    optimizer = strategy.mirror(torch.optim.SGD(users.parameters(), 0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor) -> None:
        context = ls.get_replica_context()
        assert context is not None
        loss = mirrored(x).square().sum()
        (loss * 8.0).backward()
        optimizer.update(context, totals=Totals(loss.detach(), float(len(x))), clip_norm=0.1, scaler=scaler)

    (x,) = strategy.distribute_dataset([rows(0)])
    strategy.run(step, (x,))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))
