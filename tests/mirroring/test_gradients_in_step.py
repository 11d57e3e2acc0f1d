"""A step that looks at gradients between backward and update sees those of one device on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from tests.conftest import MakeStrategy
from torch import nn

import lockstep as ls
from lockstep.errors import CollectiveError

Step = Callable[[nn.Module, torch.optim.Optimizer], Any]

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [
    (batch := torch.randn(rows, 4, generator=GENERATOR), batch.sum(1, keepdim=True) * 3) for rows in (9, 9, 7, 9)
]

pytestmark = pytest.mark.usefixtures("layout")


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def clip(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def clip_values(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.step_after = None  # type: ignore[attr-defined]
    nn.utils.clip_grad_value_(net.parameters(), 0.05)
    optimizer.step()
    net.zero_grad()


def look_after(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.step()
    return sum(each.grad.square().sum() for each in net.parameters() if each.grad is not None)


def replace(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for each in net.parameters():
        if each.grad is not None:
            each.grad = each.grad / each.grad.norm()
    optimizer.step()
    for each in net.parameters():
        each.grad = None


def zero_by_hand(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.step()
    for each in net.parameters():
        if each.grad is not None:
            each.grad.zero_()


def one_device(after: Step, make_optimizer: Any) -> tuple[nn.Module, list[Any]]:
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    seen = []
    for x, y in BATCHES:
        if after is look_after:
            optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        seen.append(after(net, optimizer))
    return net, seen


@pytest.mark.parametrize("after", [clip, clip_values, look_after, replace, zero_by_hand])
@pytest.mark.parametrize("replicas", [2, 4])
def test_gradients_looked_at_in_the_step_are_those_of_one_device(
    make_strategy: MakeStrategy, after: Step, replicas: int
):
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    expected, looked = one_device(after, make_optimizer)
    strategy, net = make_strategy(replicas), make_net()
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(make_optimizer(mirrored.parameters()))

    def step(batch: Any) -> Any:
        if after is look_after:
            optimizer.zero_grad()
        loss = ls.compute_average_loss(F.mse_loss(mirrored(batch[0]), batch[1], reduction="none")[:, 0])
        loss.backward()
        return after(mirrored, optimizer)

    seen = [strategy.run(step, (batch,)) for batch in strategy.distribute_dataset(BATCHES)]

    torch.testing.assert_close(net.state_dict(), expected.state_dict())
    for ours, theirs in zip(seen, looked, strict=True):
        if isinstance(theirs, torch.Tensor):
            for value in strategy.local_results(ours):
                torch.testing.assert_close(value, theirs)


def test_two_backward_passes_around_a_look_add_up(make_strategy: MakeStrategy):
    x, y = BATCHES[0]
    plain = make_net()
    F.mse_loss(plain(x), y).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    (plain(x).sum() / 9).backward()
    strategy, net = make_strategy(3), make_net()
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 1.0))
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def step(batch: Any) -> None:
        losses = F.mse_loss(mirrored(batch[0]), batch[1], reduction="none")[:, 0]
        ls.compute_average_loss(losses).backward()
        nn.utils.clip_grad_norm_(mirrored.parameters(), 0.1)
        (mirrored(batch[0]).sum() / 9).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset([BATCHES[0]]):
        strategy.run(step, (batch,))

    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(before[name] - net.state_dict()[name], parameter.grad)


def test_weights_updated_by_hand_in_the_step_are_those_of_one_device(make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), make_net()
    mirrored = strategy.mirror(net)

    def step(batch: Any) -> None:
        losses = F.mse_loss(mirrored(batch[0]), batch[1], reduction="none")[:, 0]
        ls.compute_average_loss(losses).backward()
        with torch.no_grad():
            for each in mirrored.parameters():
                each -= 0.1 * each.grad
                each.grad.zero_()

    for batch in strategy.distribute_dataset(BATCHES):
        strategy.run(step, (batch,))

    expected = oracle.train(make_net(), BATCHES, lambda parameters: torch.optim.SGD(parameters, 0.1), F.mse_loss)
    torch.testing.assert_close(net.state_dict(), expected.module.state_dict())


def test_gradients_looked_at_in_the_step_and_stepped_outside(make_strategy: MakeStrategy):
    expected, _ = one_device(clip, lambda parameters: torch.optim.SGD(parameters, 0.1))
    strategy, net = make_strategy(3), make_net()
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

    def step(batch: Any) -> None:
        losses = F.mse_loss(mirrored(batch[0]), batch[1], reduction="none")[:, 0]
        ls.compute_average_loss(losses).backward()
        nn.utils.clip_grad_norm_(mirrored.parameters(), 0.5)

    for batch in strategy.distribute_dataset(BATCHES):
        strategy.run(step, (batch,))
        optimizer.step()
        optimizer.zero_grad()

    torch.testing.assert_close(net.state_dict(), expected.state_dict())


def test_one_replica_that_looks_alone_is_an_error(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(make_net())
    strategy.mirror(optimizer := torch.optim.SGD(mirrored.parameters(), 0.1))
    del optimizer

    def step(x: torch.Tensor) -> None:
        mirrored(x).sum().backward()
        context = ls.get_replica_context()
        if context is not None and context.replica_id_in_sync_group == 0:
            next(iter(mirrored.parameters())).grad  # noqa: B018

    with pytest.raises(CollectiveError):
        strategy.run(step, (BATCHES[0][0],))
