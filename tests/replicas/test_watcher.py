"""A watcher sees what a strategy does: devices, runs, and each replica's gradients before they are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.watcher import Run, Totals, Watcher, ambient_watchers, watching

if TYPE_CHECKING:
    from lockstep.config import LogicalDevice
    from lockstep.strategies.mirrored import MirroredStrategy

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Ears(Watcher):
    """Keeps all that it hears."""

    def __init__(self) -> None:
        self.devices: list[tuple[str, ...]] = []
        self.views: list[Any] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self.after: dict[int, torch.Tensor] = {}

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        self.devices.append(tuple(device.name for device in devices))
        return devices[:2]

    def run_begins(self, run: Run) -> None:
        self.views.append(run.views)

    def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        (weight,) = parameters
        assert weight.grad is not None
        self.before[replica] = (
            weight.grad.clone(),
            weight.detach().clone(),
            float(totals.count),
        )

    def update_ended(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        self.after[replica] = parameters[0].detach().clone()


def train(strategy: MirroredStrategy) -> nn.Module:
    torch.manual_seed(0)
    module = strategy.mirror(nn.Linear(3, 1, bias=False))
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(x: torch.Tensor, *, scale: float) -> None:
        (module(x).sum() * scale).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset([X]):
        strategy.run(step, (batch,), {"scale": 0.5})
    return module


def test_a_watcher_hears_devices_runs_and_gradients(make_strategy: Callable[..., MirroredStrategy]):
    ears = Ears()
    with watching(ears):
        module = train(make_strategy(3))

    assert ears.devices == [("cpu:0", "cpu:1", "cpu:2")]
    (views,) = ears.views
    assert [len(args[0]) for args, _ in views] == [3, 2]  # the two devices that were returned, not the three chosen
    assert [named for _, named in views] == [{"scale": 0.5}] * 2
    torch.testing.assert_close(ears.before[0][0], 0.5 * X[:3].sum(0, keepdim=True))
    torch.testing.assert_close(ears.before[1][0], 0.5 * X[3:].sum(0, keepdim=True))
    assert [ears.before[replica][2] for replica in range(2)] == [1.0, 0.0]
    stepped = ears.before[0][1] - 0.1 * 0.5 * X.sum(0, keepdim=True)
    for replica in range(2):
        torch.testing.assert_close(ears.after[replica], stepped)
    torch.testing.assert_close(next(module.parameters()).detach(), stepped)


def test_outside_the_block_nobody_hears(make_strategy: Callable[..., MirroredStrategy]):
    ears = Ears()
    with watching(ears):
        assert ambient_watchers.get() == (ears,)
    train(make_strategy(2))

    assert ambient_watchers.get() == ()
    assert (ears.devices, ears.views, ears.before) == ([], [], {})


def test_what_a_watcher_raises_ends_the_run_and_leaves_the_strategy_usable(
    make_strategy: Callable[..., MirroredStrategy],
):
    class EnoughSeen(BaseException):
        pass

    class Impatient(Watcher):
        def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
            raise EnoughSeen

    strategy = make_strategy(2)
    with watching(Impatient()), pytest.raises(EnoughSeen):
        train(strategy)

    assert train(strategy) is not None


def test_the_default_moments_change_nothing(make_strategy: Callable[..., MirroredStrategy]):
    with watching(Watcher()):
        observed = train(make_strategy(2))
    unobserved = train(make_strategy(2))

    assert torch.equal(next(observed.parameters()), next(unobserved.parameters()))


def test_the_modules_of_a_strategy_are_listed_in_order(make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)
    first, second = strategy.mirror(nn.Linear(1, 1)), strategy.mirror(nn.Linear(2, 2))

    assert isinstance(strategy, ls.Strategy)
    assert strategy.mirrored_modules == (first, second)
