"""Optimizers that have methods and attributes of their own, as schedule-free ones have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.errors import UsageError

STEPS = 4


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al. 2024): it trains at one point, and is evaluated at the average."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "count": 0, "training": True})
        self.power = 1.0

    def train(self) -> None:
        """To the point of training."""
        self._exchange(training=True)

    def eval(self) -> None:
        """To the average."""
        self._exchange(training=False)

    @property
    def count(self) -> int:
        """Of the steps."""
        return int(self.param_groups[0]["count"])

    @torch.no_grad()
    def _exchange(self, *, training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for parameter in group["params"] if group["training"] != training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() first")
            group["count"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                average = parameter.lerp(z, 1 - 1 / group["beta"])
                z.sub_(parameter.grad, alpha=group["lr"])
                average.lerp_(z, 1 / group["count"] ** self.power)
                parameter.copy_(average.lerp(z, 1 - group["beta"]))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def rows(step: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(step))


def test_they_are_those_of_the_plain_optimizer(layout: str, make_strategy: MakeStrategy):
    plain = net()
    own = ScheduleFree(plain.parameters(), 0.05)
    expected = []
    for number in range(STEPS):
        own.train()
        if number == 2:
            own.power = 0.5
        own.zero_grad()
        plain(rows(number)).square().sum().backward()
        own.step()
        own.eval()
        expected.append(plain(rows(9)).detach())

    strategy, users = make_strategy(3), net()
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(ScheduleFree(users.parameters(), 0.05))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(STEPS)])):
        optimizer.train()
        if number == 2:
            optimizer.power = 0.5
        strategy.run(step, (x,))
        optimizer.eval()
        for output in (mirrored(rows(9)), *strategy.local_results(strategy.run(mirrored, (rows(9),)))):
            torch.testing.assert_close(output.detach(), expected[number])
    assert optimizer.count == own.count == STEPS


def test_in_a_replica_they_are_refused(make_strategy: MakeStrategy):
    strategy, users = make_strategy(2), net()
    mirrored = strategy.mirror(users)
    optimizer = strategy.mirror(ScheduleFree(users.parameters(), 0.05))

    with pytest.raises(UsageError, match=r"ScheduleFree\.eval .*outside strategy\.run"):
        strategy.run(optimizer.eval)
    with pytest.raises(UsageError, match=r"ScheduleFree\.eval .*outside strategy\.run"):
        strategy.run(lambda: optimizer.eval())
    assert mirrored
    assert hasattr(optimizer, "eval")
    assert not hasattr(optimizer, "absent")


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state it has; as such ones do, it does not call Optimizer.__init__."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast, self.param_groups, self.state = fast, fast.param_groups, fast.state
        self.defaults, self.steps = fast.defaults, 0
        self.slow = [each.detach().clone() for group in fast.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()
        self.steps += 1
        if self.steps % 2 == 0:
            weights = [each for group in self.param_groups for each in group["params"]]
            for slow, weight in zip(self.slow, weights, strict=True):
                weight.copy_(slow.lerp_(weight, 0.5))


def test_an_optimizer_around_another_one_is_that_of_one_device(make_strategy: MakeStrategy):
    strategy, plain, given = make_strategy(3), net(), net()
    mirrored = strategy.mirror(given)
    optimizer = strategy.mirror(Lookahead(torch.optim.SGD(given.parameters(), 0.1)))
    alone = Lookahead(torch.optim.SGD(plain.parameters(), 0.1))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (mirrored(x).square().sum() / 7).backward()
        optimizer.step()

    for x in strategy.distribute_dataset([rows(0), rows(1), rows(2)]):
        strategy.run(step, (x,))
    for x in (rows(0), rows(1), rows(2)):
        plain.zero_grad()
        (plain(x).square().sum() / 7).backward()
        alone.step()

    for mine, theirs in zip(given.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
