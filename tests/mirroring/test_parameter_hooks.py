"""Hooks on parameters: in a loop several replicas refuse them, since each would see one replica's gradient.

In fit updates call them, with the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import lockstep as ls
from lockstep.errors import UsageError

KINDS = ["register_hook", "register_post_accumulate_grad_hook"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
def test_several_replicas_refuse_them(kind: str, late: bool, make_strategy: MakeStrategy):
    strategy, users = make_strategy(3), net()
    if not late:
        handle = getattr(users[2].weight, kind)(lambda _: None)
    mirrored = strategy.mirror(users)
    if late:
        handle = getattr(users[2].weight, kind)(lambda _: None)

    with pytest.raises(UsageError, match=r"shape \(3, 5\) has a hook \(.*between backward\(\) and optimizer\.step\(\)"):
        strategy.run(mirrored, (torch.ones(2, 4),))
    handle.remove()
    strategy.run(mirrored, (torch.ones(2, 4),))


@pytest.mark.parametrize("kind", KINDS)
def test_registered_in_a_step_they_are_refused(kind: str, make_strategy: MakeStrategy):
    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)

    def step() -> None:
        getattr(mirrored[0].weight, kind)(lambda _: None)

    with pytest.raises(UsageError, match=r"hook on '0\.weight'.*one replica's gradient"):
        strategy.run(step)


def test_one_replica_calls_them_as_torch_does(make_strategy: MakeStrategy):
    strategy, users, seen = make_strategy(1), net(), list[Tensor]()
    mirrored = strategy.mirror(users)
    users[2].bias.register_hook(seen.append)
    strategy.run(lambda x: mirrored(x).sum().backward(), (torch.ones(2, 4),))
    assert [each.tolist() for each in seen] == [[2.0, 2.0, 2.0]]


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [(torch.randn(7, 4, generator=random), torch.randn(7, 3, generator=random)) for _ in range(number)]


def clamps(weight: Tensor) -> RemovableHandle:
    return weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def clamps_and_logs(weight: Tensor) -> RemovableHandle:
    weight.register_hook(lambda gradient: None)
    return clamps(weight)


def freezes(weight: Tensor) -> RemovableHandle:
    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    return weight.register_post_accumulate_grad_hook(drop)


def steps_by_itself(weight: Tensor) -> RemovableHandle:
    own = torch.optim.Adam([weight], 0.1)

    def step(parameter: Tensor) -> None:
        own.step()
        parameter.grad = None

    return weight.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("register", [clamps, clamps_and_logs, freezes, steps_by_itself])
def test_fit_trains_with_them_as_one_device_also_when_one_is_removed(
    register: Callable[[Tensor], RemovableHandle], replicas: int, make_strategy: MakeStrategy, layout: str
):
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5, momentum=0.9)
    handle = register(plain[2].weight)
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            handle.remove()
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()

    with make_strategy(replicas).scope():
        users = net()
        model = ls.Model(users)
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9), "mse", clip_norm=0.3)
        handle = register(users[2].weight)
        model.fit(batches(4)[:2], verbose=0)
        handle.remove()
        model.fit(batches(4)[2:], verbose=0)
    for copy in model._module.copies:
        torch.testing.assert_close(dict(copy.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_after_fit_has_them_as_before(kind: str, make_strategy: MakeStrategy):
    for replicas in (1, 3):
        strategy, users, seen = make_strategy(replicas), net(), list[Tensor]()
        with strategy.scope():
            model = ls.Model(users)
            model.compile("sgd", "mse")
            getattr(users[2].bias, kind)(lambda _, seen=seen: seen.append(_))
            model.fit(batches(2), verbose=0)
        assert len(seen) == 2
        mirrored = strategy.mirror(users)
        if replicas > 1:
            with pytest.raises(UsageError, match="one replica's gradient"):
                strategy.run(mirrored, (torch.ones(2, 4),))
        else:
            strategy.run(lambda x, mirrored=mirrored: mirrored(x).sum().backward(), (torch.ones(2, 4),))
            assert len(seen) == 3


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("settings", "why"), [({"accumulate": 2}, "several backward passes"), ({"precision": "fp16"}, "scales losses")]
)
def test_where_they_would_not_see_one_update_s_gradient_they_are_refused(
    settings: dict[str, Any], why: str, replicas: int, make_strategy: MakeStrategy
):
    with make_strategy(replicas).scope():
        users = net()
        model = ls.Model(users)
        model.compile("sgd", "mse", **settings)
        handle = clamps(users[2].weight)
        with pytest.raises(UsageError, match=why):
            model.fit(batches(2), verbose=0)
        handle.remove()
        model.fit(batches(2), verbose=0)


def test_backward_hooks_on_modules_are_warned_of_in_fit(make_strategy: MakeStrategy):
    with make_strategy(2).scope():
        users = net()
        users[2].register_full_backward_hook(lambda *_: None)
        model = ls.Model(users)
        model.compile("sgd", "mse")
        with pytest.warns(UserWarning, match=r"Linear '2' has a backward hook.*not yet divided"):
            model.fit(batches(1), verbose=0)
