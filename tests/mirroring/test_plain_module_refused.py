"""Calling the plain module inside a replica is an error of the first run, and costs the later runs nothing."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn
from torch.nn.modules import module as torch_module

from lockstep.errors import UsageError

X = torch.ones(4, 3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def test_the_plain_module_is_refused_and_named(make_strategy: MakeStrategy):
    strategy, plain = make_strategy(2), net()
    mirrored = strategy.mirror(plain)
    with pytest.raises(UsageError, match=r"plain Sequential.*replica 1; call what strategy\.mirror\(module\) returned"):
        strategy.run(lambda x: plain(x), (X,))
    strategy.run(lambda x: mirrored(x), (X,))


def test_a_part_of_the_plain_module_is_refused_too(make_strategy: MakeStrategy):
    strategy, plain = make_strategy(2), net()
    mirrored = strategy.mirror(plain)
    with pytest.raises(UsageError, match="the step calls the plain Sequential"):
        strategy.run(lambda x: (mirrored(x), plain[0](x)), (X,))


def test_the_mirrored_module_its_parts_and_a_module_that_is_not_mirrored_are_called(make_strategy: MakeStrategy):
    strategy, teacher = make_strategy(3), net().requires_grad_(False)
    mirrored = strategy.mirror(net())
    strategy.run(lambda x: mirrored(x) + mirrored.get_submodule("1")(mirrored.get_submodule("0")(x)) + teacher(x), (X,))


def test_one_replica_and_code_outside_replicas_may_call_it(make_strategy: MakeStrategy):
    strategy, plain = make_strategy(1), net()
    strategy.mirror(plain)
    strategy.run(lambda x: plain(x), (X,))
    plain(X)


def test_after_the_first_run_nothing_of_the_check_is_left(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(net())
    seen: list[int] = []

    def step(x: torch.Tensor) -> None:
        mirrored(x)
        seen.append(len(torch_module._global_forward_pre_hooks))

    strategy.run(step, (X,))
    strategy.run(step, (X,))

    assert seen == [1, 1, 0, 0]
    assert not torch_module._global_forward_pre_hooks
