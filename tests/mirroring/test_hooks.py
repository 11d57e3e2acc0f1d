"""Hooks that the user registers on parts of the module, before or after it was mirrored: as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.errors import UsageError

STEPS = 5


class Net(nn.Module):
    """Two layers, and what hooks may do with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y

    def shifted(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output + self.shift


def forward_hook(net: Net) -> RemovableHandle:
    return net.first.register_forward_hook(lambda _, __, output: output * 0.5)


def forward_hook_with_kwargs(net: Net) -> RemovableHandle:
    return net.first.register_forward_hook(lambda _, __, ___, output: output * 0.5, with_kwargs=True)


def forward_pre_hook(net: Net) -> RemovableHandle:
    return net.second.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def forward_pre_hook_with_kwargs(net: Net) -> RemovableHandle:
    return net.second.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)


def backward_hook(net: Net) -> RemovableHandle:
    return net.second.register_full_backward_hook(lambda _, inputs, __: (inputs[0].clamp(-0.1, 0.1),))


def backward_pre_hook(net: Net) -> RemovableHandle:
    return net.second.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 0.1,))


def bound_method(net: Net) -> RemovableHandle:
    return net.first.register_forward_hook(net.shifted)


def partial_of_a_method(net: Net) -> RemovableHandle:
    def shifted(of: Net, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output + of.shift * 2

    return net.first.register_forward_hook(partial(shifted, net))


def hook_of_the_whole(net: Net) -> RemovableHandle:
    return net.register_forward_hook(lambda _, __, output: output.relu())


HOOKS: list[Callable[[Net], RemovableHandle]] = [
    *(forward_hook, forward_hook_with_kwargs, forward_pre_hook, forward_pre_hook_with_kwargs, backward_hook),
    *(backward_pre_hook, bound_method, partial_of_a_method, hook_of_the_whole),
]


def rows(step: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(step))


class Registering:
    """Registers a hook before a step, and one more that comes first, and removes it before another."""

    def __init__(self, net: Net, register: Callable[[Net], RemovableHandle]) -> None:
        self._net = net
        self._register = register

    def before(self, step: int) -> None:
        if step == 1:
            self._handle = self._register(self._net)
        if step == 2:
            self._net.second.register_forward_hook(lambda _, __, output: output + 1)
            self._net.second.register_forward_hook(lambda _, __, output: output * 1.5, prepend=True)
        if step == 4:
            self._handle.remove()


@pytest.mark.parametrize("mirrored_at", [0, 2])
@pytest.mark.parametrize("register", HOOKS)
def test_on_parts_of_the_module(
    register: Callable[[Net], RemovableHandle], mirrored_at: int, make_strategy: MakeStrategy
):
    plain = Net()
    own, registering = torch.optim.SGD(plain.parameters(), 0.002), Registering(plain, register)
    for number in range(STEPS):
        registering.before(number)
        own.zero_grad()
        plain(rows(number)).square().sum().backward()
        if number >= mirrored_at:
            own.step()

    strategy, net = make_strategy(3), Net()
    registering = Registering(net, register)
    for number in range(mirrored_at):
        registering.before(number)
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.002))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(STEPS)])):
        if number >= mirrored_at:
            registering.before(number)
            strategy.run(step, (x,))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))


def test_registered_on_the_mirrored_object_it_runs_in_every_replica(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(Net())
    handle = mirrored.register_forward_hook(lambda _, __, output: output * 2)
    doubled = strategy.local_results(strategy.run(mirrored, (rows(0),)))
    handle.remove()
    plain = strategy.local_results(strategy.run(mirrored, (rows(0),)))
    for twice, once in zip(doubled, plain, strict=True):
        torch.testing.assert_close(twice, 2 * once)


def test_features_kept_on_the_module_are_each_replica_s(make_strategy: MakeStrategy):
    def penalty(net: Any, x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().sum() + net.first.kept.abs().sum()
        loss.backward()
        return loss.detach()

    def keep(part: nn.Module, _: Any, output: Tensor) -> None:
        part.kept = output  # type: ignore[assignment]

    plain = Net()
    plain.first.register_forward_hook(keep)
    expected = [penalty(plain, rows(number)) for number in range(3)]

    strategy, net = make_strategy(3), Net()
    mirrored = strategy.mirror(net)
    net.first.register_forward_hook(keep)
    batches = strategy.distribute_dataset([rows(number) for number in range(3)])
    losses = [strategy.reduce("sum", strategy.run(penalty, (mirrored, x))) for x in batches]
    torch.testing.assert_close(losses, expected)


FEATURES: dict[str, Tensor] = {}


class Keeper:
    """A hook with a memory of its own."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.kept = [output]

    def keep(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.kept.append(output)


def in_a_closure() -> Callable[..., None]:
    found: dict[str, Tensor] = {}
    return lambda _, __, output: found.update(kept=output)


def in_a_global() -> Callable[..., None]:
    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        FEATURES["kept"] = output.detach()

    return keep


def in_a_partial() -> Callable[..., None]:
    def keep(into: list[Tensor], _: nn.Module, __: Any, output: Tensor) -> None:
        into.append(output)

    return partial(keep, [])


@pytest.mark.parametrize("make", [in_a_closure, in_a_global, in_a_partial, Keeper, lambda: Keeper().keep])
def test_features_kept_outside_of_the_module_are_refused(
    make: Callable[[], Callable[..., None]], make_strategy: MakeStrategy
):
    strategy, net = make_strategy(3), Net()
    mirrored = strategy.mirror(net)
    net.first.register_forward_hook(make())
    (x,) = strategy.distribute_dataset([rows(0)])
    with pytest.raises(UsageError, match=r"the hook .* outside of the module.*part\.kept"):
        strategy.run(mirrored, (x,))
    FEATURES.clear()


def test_an_error_that_follows_from_it_says_so(make_strategy: MakeStrategy):
    strategy, net, found = make_strategy(3), Net(), {}
    mirrored = strategy.mirror(net)

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        found["kept"] = output

    net.first.register_forward_hook(keep)

    def step(x: Tensor) -> None:
        mirrored(x)
        found["other"].sum().backward()

    (x,) = strategy.distribute_dataset([rows(0)])
    with pytest.raises(UsageError, match=r"keep keeps tensors of the step in 'found'"):
        strategy.run(step, (x,))


def test_what_each_replica_keeps_under_its_number_is_its_own(make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), Net()
    found: dict[int, Tensor] = {}
    mirrored = strategy.mirror(net)

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        found[here().local_replica] = output

    net.first.register_forward_hook(keep)
    (x,) = strategy.distribute_dataset([rows(0)])
    strategy.run(mirrored, (x,))
    expected = nn.functional.linear(rows(0), net.first.weight, net.first.bias)
    torch.testing.assert_close(torch.cat([found[replica] for replica in range(3)]), expected)


def test_an_object_of_the_module_may_keep_them(make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), Net()
    net.keeper = Keeper()
    net.first.register_forward_hook(net.keeper.keep)
    mirrored = strategy.mirror(net)

    def step(x: Tensor) -> Tensor:
        mirrored(x)
        kept: Tensor = mirrored.keeper.kept[-1]
        return kept

    (x,) = strategy.distribute_dataset([rows(0)])
    torch.testing.assert_close(strategy.gather(strategy.run(step, (x,)), 0), net.first(rows(0)))
