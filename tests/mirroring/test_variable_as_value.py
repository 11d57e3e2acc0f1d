"""What is read of variables, in replicas and outside, and what they are not: tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.context import get_replica_context

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]


def test_a_variable_converts_to_plain_values(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    number, vector = strategy.variable(2.5), strategy.variable(torch.tensor([1.0, 2.0]))

    def converted() -> list[Any]:
        return [float(number), int(number), bool(number), vector.numpy().tolist(), numpy.asarray(vector).tolist()]

    expected = [2.5, 2, True, [1.0, 2.0], [1.0, 2.0]]
    assert converted() == expected
    assert all(each == expected for each in strategy.local_results(strategy.run(converted)))


USES: dict[str, Callable[[Any], Any]] = {
    "+": lambda v: v + 1,
    "tensor +": lambda v: torch.ones(2) + v,
    "function": torch.exp,
    "+=": lambda v: operator.iadd(v, 1.0),
    "item": lambda v: operator.setitem(v, 0, 1.0),
    "method": lambda v: v.fill_(1.0),
    "attribute": lambda v: v.data,
    "set": lambda v: setattr(v, "data", torch.ones(2)),
}


@pytest.mark.parametrize("name", USES)
def test_a_variable_is_no_tensor(name: str, make_strategy: MakeStrategy):
    variable = make_strategy(2).variable(torch.zeros(2))

    with pytest.raises((TypeError, AttributeError, UsageError)):
        USES[name](variable)
    assert variable.read_value().tolist() == [0, 0]


def test_what_asks_for_a_value_takes_a_variable(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.variable(torch.tensor([0.1]), aggregation="mean")
    own = strategy.variable(PerReplica([torch.tensor([each]) for each in (1.0, 2.0, 4.0)]), synchronization="on_read")

    assert torch.equal(strategy.reduce("mean", mirrored), torch.tensor([0.1]))
    assert torch.equal(strategy.reduce("sum", {"a": (own, 1)})["a"][0], torch.tensor([7.0]))
    assert torch.equal(strategy.reduce("mean", own, axis=0), torch.tensor(7.0) / 3)
    assert strategy.gather(own, axis=0).tolist() == [1, 2, 4]
    assert [each.tolist() for each in strategy.local_results(own)] == [[1], [2], [4]]

    def step() -> tuple[Tensor, Tensor, Tensor]:
        context = get_replica_context()
        assert context is not None
        everyones, gathered = context.all_reduce("sum", own), context.all_gather(own, 0)
        mirrored.assign(own)
        return everyones, gathered, mirrored.read_value()

    for everyones, gathered, written in strategy.local_results(strategy.run(step)):
        assert (everyones.tolist(), gathered.tolist()) == ([7], [1, 2, 4])
        assert torch.equal(written, torch.tensor([7.0]) / 3)
    mirrored.assign(own.per_replica[2])
    other = strategy.variable(torch.zeros(1), aggregation="sum")
    other.assign(mirrored)
    other.assign_sub(strategy.variable(1.5))
    assert other.read_value().tolist() == [2.5]
    assert float(strategy.variable(mirrored)) == 4.0


def test_a_counter_divides_a_running_sum_as_on_one_device(make_strategy: MakeStrategy):
    rows = torch.arange(10.0)
    expected_sum, expected_count = torch.zeros(()), 0
    for batch in rows.split(5):
        expected_sum, expected_count = expected_sum + batch.sum(), expected_count + len(batch)
    strategy = make_strategy(3)
    total = strategy.variable(0.0, aggregation="sum", synchronization="on_read")
    count = strategy.variable(0, aggregation="sum", synchronization="on_read")

    def step(shard: Tensor) -> None:
        total.assign_add(shard.sum())
        count.assign_add(len(shard))

    for shards in strategy.distribute_dataset(list(rows.split(5))):
        strategy.run(step, args=(shards,))

    assert float(total) / int(count) == float(expected_sum / expected_count)


@pytest.mark.parametrize("value", [12, -7, 0, 2])
def test_a_counter_reads_what_was_assigned_whatever_the_number_of_replicas(value: int, make_strategy: MakeStrategy):
    for replicas in (1, 3, 5):
        counter = make_strategy(replicas).variable(0, aggregation="sum", synchronization="on_read")
        counter.assign(value)
        assert int(counter) == value


def test_values_that_were_changed_in_place_are_refused_where_they_differ(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(torch.zeros(2), aggregation="sum")
    for value in variable.values:
        value.fill_(3.0)
    assert variable.read_value().tolist() == [3, 3]

    variable.values[0].fill_(4.0)

    for use in (variable.read_value, lambda: float(variable), lambda: strategy.run(lambda: variable.read_value())):
        with pytest.raises(UsageError, match=r"in place.*assign"):
            use()
    variable.assign(torch.ones(2))
    assert variable.read_value().tolist() == [1, 1]


def test_a_weight_written_in_place_by_a_variable_takes_no_replica_s_own_value(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = strategy.mirror(nn.Linear(2, 2))
    own = strategy.variable(PerReplica([1.0, 2.0]), synchronization="on_read")
    same = strategy.variable(0.5, aggregation="mean")
    before = module.weight.detach().clone()

    def step(factor: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(factor.read_value())

    with pytest.raises(UsageError, match="differ"):
        strategy.run(step, args=(own,))
    assert torch.equal(module.weight, before)
    strategy.run(step, args=(same,))
    assert torch.equal(module.weight, before * 0.5)


def test_read_outside_a_variable_without_aggregation_has_no_value(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    local = strategy.variable(1.0, synchronization="on_read")
    written = strategy.variable(1.0)
    assert float(written) == 1.0

    def step() -> None:
        context = get_replica_context()
        assert context is not None
        written.assign(float(context.replica_id_in_sync_group))

    strategy.run(step)

    for variable in (local, written):
        for use in (variable.read_value, lambda v=variable: float(v)):  # type: ignore[misc]
            with pytest.raises(UsageError, match=r"none.*strategy\.local_results"):
                use()
        assert len(strategy.local_results(variable)) == 2
    alone = make_strategy(1).variable(1.0, synchronization="on_read")
    assert float(alone) == 1.0


def test_one_value_of_all_replicas_does_not_begin_with_different_ones(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    for aggregation in ("sum", "mean", "only_first"):
        with pytest.raises(ConfigError, match=r"PerReplica.*on_read"):
            strategy.variable(PerReplica([1.0, 2.0]), aggregation=aggregation)  # type: ignore[arg-type]
        nan = strategy.variable(PerReplica([math.nan, math.nan]), aggregation=aggregation)  # type: ignore[arg-type]
        assert math.isnan(float(nan))


def test_variables_are_keys_and_are_compared_by_value(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    first, second = strategy.variable(torch.ones(2)), strategy.variable(torch.ones(2))

    assert {first: 1, second: 2}[second] == 2
    assert (first == second).tolist() == [True, True]
    strategy.run(lambda: (first.read_value(), second.read_value()))  # they are known to the strategy by identity
