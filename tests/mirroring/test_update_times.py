"""Where the time of an update went: the moments are in order, and a replica that is waited for shows in the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.mirroring.optim.step import Totals, UpdateTimes
from lockstep.replicas.context import get_replica_context

if TYPE_CHECKING:
    from lockstep.mirroring.optim.optimizer import MirroredOptimizer
    from lockstep.strategies.mirrored import MirroredStrategy

LATE_S = 0.05


def train(
    strategy: MirroredStrategy, make: Callable[..., torch.optim.Optimizer], count: float = 1.0, late: int | None = None
) -> MirroredOptimizer:
    module = strategy.mirror(nn.Linear(3, 1))
    optimizer = strategy.mirror(make(module.parameters()))

    def step(x: torch.Tensor) -> None:
        context = get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == late:
            until = time.perf_counter() + LATE_S
            while time.perf_counter() < until:  # busy, as a replica is whose shard takes longer
                x.sum()
        module(x).sum().backward()
        optimizer.update(context, totals=Totals(1.0, count))

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
        assert times is not None
        moments = [times.arrived_s, times.opened_s, times.exchanged_s, times.updated_s, times.closed_s]
        assert moments == sorted(moments)
        assert (times.updated_s == times.closed_s) == (make is indivisible)
        assert times.waiting_s + times.exchange_s + times.update_s == pytest.approx(times.closed_s - times.arrived_s)


def test_a_late_replica_is_waited_for_by_the_others(make_strategy: Callable[..., MirroredStrategy]):
    punctual, late = train(make_strategy(2), sgd, late=1).times

    assert punctual is not None
    assert late is not None
    assert punctual.opened_s - punctual.arrived_s > 0.5 * LATE_S
    assert late.opened_s - late.arrived_s < 0.5 * LATE_S


def test_there_are_no_times_before_an_update_and_after_a_skipped_one(make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)
    module = strategy.mirror(nn.Linear(3, 1))

    assert strategy.mirror(sgd(module.parameters())).times == (None, None)
    assert train(strategy, sgd, count=0.0).times == (None, None)


def test_waiting_is_before_and_after_the_work():
    times = UpdateTimes(arrived_s=1.0, opened_s=2.0, exchanged_s=4.0, updated_s=6.0, closed_s=7.0)

    assert (times.waiting_s, times.exchange_s, times.update_s) == (2.0, 2.0, 2.0)
