"""Where the time of an update went: the moments are in order, and no replica goes on before all have arrived."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.conftest import here
from torch import nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.watcher import Totals
from lockstep.strategies.mirrored import MirroredStrategy


def train(
    strategy: MirroredStrategy, make: Callable[..., torch.optim.Optimizer], count: float = 1.0
) -> MirroredOptimizer:
    module = strategy.mirror(nn.Linear(3, 1))
    optimizer = strategy.mirror(make(module.parameters()))

    def step(x: torch.Tensor) -> None:
        module(x).sum().backward()
        optimizer.update(here(), totals=Totals(1.0, count))

    strategy.run(step, (PerReplica([torch.ones(2, 3)] * strategy.num_replicas_in_sync),))
    return optimizer


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)  # type: ignore[arg-type]


class Indivisible(torch.optim.SGD):
    """Not one of the optimizers known to be elementwise: one replica updates all weights."""


def indivisible(parameters: object) -> torch.optim.Optimizer:
    return Indivisible(parameters, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [sgd, indivisible])
def test_every_replica_has_its_moments_in_order(
    make_strategy: Callable[..., MirroredStrategy], make: Callable[..., torch.optim.Optimizer]
):
    optimizer = train(make_strategy(3), make)
    assert len(optimizer.times) == 3
    for times in optimizer.times:
        moments = [times.arrived_s, times.opened_s, times.exchanged_s, times.updated_s, times.closed_s]
        assert moments == sorted(moments)
        assert (times.updated_s == times.closed_s) == (make is indivisible)
        assert times.exchange_s + times.update_s == pytest.approx(times.updated_s - times.opened_s)


def test_the_exchange_begins_once_all_replicas_have_arrived(make_strategy: Callable[..., MirroredStrategy]):
    times = train(make_strategy(3), sgd).times
    assert min(each.opened_s for each in times if each) >= max(each.arrived_s for each in times if each)


def test_there_are_no_times_before_an_update_and_after_a_skipped_one(make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)
    module = strategy.mirror(nn.Linear(3, 1))
    assert strategy.mirror(sgd(module.parameters())).times == (None, None)
    assert train(strategy, sgd, count=0.0).times == (None, None)
