"""Hooks on parameters: several replicas refuse them, since each would see one replica's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

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
