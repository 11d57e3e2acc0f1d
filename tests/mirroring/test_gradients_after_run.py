"""Gradients looked at, changed or cleared outside replicas after a run are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

ROWS = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
Backward = Callable[[Tensor], None]


def clip(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def scale(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    for parameter in net.parameters():
        parameter.grad.mul_(0.5)


def scale_between(net: nn.Module, plain: Any, backward: Backward) -> None:
    scale(net, plain, backward)
    backward(ROWS[1])


def clear_module(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    net.zero_grad()
    backward(ROWS[1])


def clear_plain_optimizer(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    plain.zero_grad()
    backward(ROWS[1])


def zeros_by_plain_optimizer(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    plain.zero_grad(set_to_none=False)
    backward(ROWS[1])


def none_of_one(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    next(net.parameters()).grad = None


def given_one(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    first = next(net.parameters())
    first.grad = torch.ones_like(first)


def add_up(net: nn.Module, plain: Any, backward: Backward) -> None:
    for batch in ROWS:
        backward(batch)


def penalty_outside(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum().backward()
    backward(ROWS[1])


def steps_plain_optimizer(net: nn.Module, plain: Any, backward: Backward) -> None:
    backward(ROWS[0])
    plain.step()
    plain.zero_grad()
    backward(ROWS[1])


PROGRAMS = [
    *(clip, scale, scale_between, clear_module, clear_plain_optimizer, zeros_by_plain_optimizer, none_of_one),
    *(given_one, add_up, penalty_outside, steps_plain_optimizer),
]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_the_update_of_one_device(program: Any, inside: bool, layout: str, make_strategy: MakeStrategy):
    net, strategy = make_net(), make_strategy(3)
    expected = copy.deepcopy(net)
    momentum = 0.0 if program is steps_plain_optimizer else 0.9
    one = torch.optim.SGD(expected.parameters(), 0.1, momentum=momentum)
    mirrored = strategy.mirror(net)
    plain = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
    optimizer = strategy.mirror(plain)

    def backward(batch: Tensor) -> None:
        for shards in strategy.distribute_dataset([batch]):
            strategy.run(lambda shard: mirrored(shard).square().sum().backward(), args=(shards,))

    for _ in range(2):
        program(expected, one, lambda batch: expected(batch).square().sum().backward())
        one.step()
        one.zero_grad()
        program(net, plain, backward)
        if inside:
            strategy.run(optimizer.step)
        else:
            optimizer.step()
        optimizer.zero_grad()

    torch.testing.assert_close(mirrored.state_dict(), expected.state_dict())


def test_gradients_read_outside_are_sums_without_an_optimizer_too(layout: str, make_strategy: MakeStrategy):
    net, strategy = make_net(), make_strategy(3)
    expected = copy.deepcopy(net)
    mirrored = strategy.mirror(net)
    for batch in ROWS:
        expected(batch).square().sum().backward()
        for shards in strategy.distribute_dataset([batch]):
            strategy.run(lambda shard: mirrored(shard).square().sum().backward(), args=(shards,))
        for module in (expected, net):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                    parameter.grad = None
    torch.testing.assert_close(mirrored.state_dict(), expected.state_dict())

    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.1))  # the module is stepped from here on
    one = torch.optim.SGD(expected.parameters(), 0.1)
    expected(ROWS[0]).square().sum().backward()
    one.step()
    for shards in strategy.distribute_dataset([ROWS[0]]):
        strategy.run(lambda shard: mirrored(shard).square().sum().backward(), args=(shards,))
    optimizer.step()
    torch.testing.assert_close(mirrored.state_dict(), expected.state_dict())


def test_a_replica_without_a_backward_pass_adds_nothing(make_strategy: MakeStrategy):
    net, strategy = make_net(), make_strategy(3)
    expected = copy.deepcopy(net)
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.1))
    one = torch.optim.SGD(expected.parameters(), 0.1)

    def step(shard: Tensor, skipped: int) -> None:
        if here().replica_id_in_sync_group != skipped:
            mirrored(shard).square().sum().backward()

    for skipped in range(3):
        for shards in strategy.distribute_dataset([ROWS[skipped]]):
            strategy.run(step, args=(shards, skipped))
            kept = [shard for at, shard in enumerate(strategy.local_results(shards)) if at != skipped]
        expected(torch.cat(kept)).square().sum().backward()
        for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    one.step()
    strategy.run(optimizer.step)
    torch.testing.assert_close(mirrored.state_dict(), expected.state_dict())


def test_two_optimizers_of_one_module_sum_once(make_strategy: MakeStrategy):
    net, strategy = make_net(), make_strategy(3)
    expected = copy.deepcopy(net)
    mirrored = strategy.mirror(net)
    optimizers = [strategy.mirror(torch.optim.SGD(net.parameters(), rate)) for rate in (0.1, 0.01)]
    ones = [torch.optim.SGD(expected.parameters(), rate) for rate in (0.1, 0.01)]
    for batch, one, optimizer in zip(ROWS, ones, optimizers, strict=False):
        one.zero_grad()
        expected(batch).square().sum().backward()
        one.step()
        optimizer.zero_grad()
        for shards in strategy.distribute_dataset([batch]):
            strategy.run(lambda shard: mirrored(shard).square().sum().backward(), args=(shards,))
        optimizer.step()

    torch.testing.assert_close(mirrored.state_dict(), expected.state_dict())


def test_passes_that_are_announced_stay_apart_until_the_last(make_strategy: MakeStrategy):
    net, strategy = make_net(), make_strategy(3)
    expected = copy.deepcopy(net)
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.1))
    assert optimizer.plain.param_groups

    def backward(shard: Tensor) -> None:
        mirrored(shard).square().sum().backward()

    def announced(shard: Tensor) -> None:
        with mirrored.no_sync():
            backward(shard)

    for number, batch in enumerate(ROWS):
        expected(batch).square().sum().backward()
        for shards in strategy.distribute_dataset([batch]):
            strategy.run(announced if number < 2 else backward, args=(shards,))
        with_gradients = [next(each.parameters()).grad is not None for each in mirrored.copies]
        assert with_gradients == ([True] * 3 if number < 2 else [True, False, False])

    for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
