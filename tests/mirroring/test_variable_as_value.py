"""Variables wherever a tensor is a value: the numbers of plain tensors, in replicas and outside, and no writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError

KINDS = [
    {"aggregation": aggregation, "synchronization": synchronization}
    for synchronization in ("on_write", "on_read")
    for aggregation in ("none", "sum", "mean", "only_first")
]

EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "x - 1": lambda x: x - 1,
    "1 - x": lambda x: 1 - x,
    "x * x": lambda x: x * x,
    "2 * x": lambda x: 2 * x,
    "x / 3": lambda x: x / 3,
    "3 / x": lambda x: 3 / x,
    "x // 2": lambda x: x // 2,
    "7 // x": lambda x: 7 // x,
    "x % 2": lambda x: x % 2,
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "x @ x": lambda x: x @ x,
    "-x": lambda x: -x,
    "abs(-x)": lambda x: abs(-x),
    "x > 2": lambda x: x > 2,
    "x >= 2": lambda x: x >= 2,
    "2 < x": lambda x: x > 2,
    "x <= 2": lambda x: x <= 2,
    "x == 2": lambda x: x == 2,
    "x != 2": lambda x: x != 2,
    "x[1:]": lambda x: x[1:],
    "x[-1]": lambda x: x[-1],
    "x[None]": lambda x: x[None],
    "tensor * x": lambda x: torch.full((3,), 0.5) * x,
    "tensor == x": lambda x: torch.arange(1.0, 4.0) == x,
    "tensor += x": lambda x: torch.ones(3).add_(x),
    "array": lambda x: numpy.asarray(x).tolist(),
    "exp": torch.exp,
    "stack": lambda x: torch.stack([x, x * 2, x]),
    "cat": lambda x: torch.cat((x, x)),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "linear": lambda x: nn.functional.linear(torch.eye(3), x),
    "as_tensor": lambda x: torch.as_tensor(x).float(),
    "sum()": lambda x: x.sum(),
    "mean(0)": lambda x: x.mean(0),
    "clamp": lambda x: x.clamp(max=2),
    "unpacked": lambda x: torch.stack(list(x)),
    "number": lambda x: float(x[0]) + int(x[1]) + bool(x[2]) + len(x) + math.floor(x[2]),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "tolist": lambda x: x.tolist(),
    "shape": lambda x: [x.shape, x.dtype, x.device, x.ndim, x.size(0), x.dim(), x.numel(), x.requires_grad],
    "in": lambda x: 2.0 in x,
    "format": lambda x: f"{x[0]:.2f}",
    "max of two": lambda x: torch.maximum(x, x + 1),
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_of_a_variable_gives_the_tensor_s_numbers(name: str, make_strategy: MakeStrategy):
    strategy, expression = make_strategy(2), EXPRESSIONS[name]
    tensor = torch.tensor([1.0, 2.0, 3.0])
    expected = plain(expression(tensor))

    for kind in KINDS:
        variable = strategy.variable(tensor, **kind)  # type: ignore[arg-type]
        inside = strategy.local_results(strategy.run(lambda variable=variable: expression(variable)))
        assert [plain(each) for each in inside] == [expected] * 2
        if kind == {"aggregation": "none", "synchronization": "on_read"}:
            continue
        variable.assign(tensor)
        assert plain(expression(variable)) == expected


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
        context = here()
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
    assert other.tolist() == [2.5]
    assert float(strategy.variable(mirrored)) == 4.0


def test_gradients_pass_by_a_variable_as_by_a_constant(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(torch.tensor([2.0, 3.0]))
    weight = nn.Parameter(torch.ones(2))
    (weight * variable).sum().backward()
    assert weight.grad.tolist() == [2, 3]


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

    assert float(total / count) == float(expected_sum / expected_count)


@pytest.mark.parametrize("value", [12, -7, 0, 2])
def test_a_counter_reads_what_was_assigned_whatever_the_number_of_replicas(value: int, make_strategy: MakeStrategy):
    for replicas in (1, 3, 5):
        counter = make_strategy(replicas).variable(0, aggregation="sum", synchronization="on_read")
        counter.assign(value)
        assert int(counter) == value


WRITES: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda v: v.fill_(1.0),
    "zero_": lambda v: v.zero_(),
    "requires_grad_": lambda v: v.requires_grad_(),
    "relu_": lambda v: torch.relu_(v),
    "out": lambda v: torch.add(torch.ones(2), 1, out=v),
    "init": lambda v: nn.init.zeros_(v),
    "data": lambda v: v.data.fill_(1.0),
    "data =": lambda v: setattr(v, "data", torch.ones(2)),
    "requires_grad =": lambda v: setattr(v, "requires_grad", True),
    "grad": lambda v: v.grad,
    "+=": lambda v: v.__iadd__(1.0),
    "*=": lambda v: v.__imul__(1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_would_write_past_the_replicas_is_refused(name: str, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    for aggregation in ("none", "mean"):
        variable = strategy.variable(torch.zeros(2), aggregation=aggregation)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="assign"):
            WRITES[name](variable)
        with pytest.raises(UsageError, match="assign"):
            strategy.run(lambda variable=variable: WRITES[name](variable))
        assert [value.tolist() for value in variable.values] == [[0, 0]] * 2


def test_values_that_were_changed_in_place_are_refused_where_they_differ(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(torch.zeros(2), aggregation="sum")
    for value in variable.values:
        value.fill_(3.0)
    assert variable.tolist() == [3, 3]

    variable.values[0].fill_(4.0)

    for use in (variable.read_value, lambda: variable + 1, lambda: strategy.run(lambda: variable + 1)):
        with pytest.raises(UsageError, match=r"in place.*assign"):
            use()
    variable.assign(torch.ones(2))
    assert variable.tolist() == [1, 1]


def test_a_weight_written_in_place_by_a_variable_takes_no_replica_s_own_value(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = strategy.mirror(nn.Linear(2, 2))
    own = strategy.variable(PerReplica([1.0, 2.0]), synchronization="on_read")
    same = strategy.variable(0.5, aggregation="mean")
    before = module.weight.detach().clone()

    def step(factor: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(factor)

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
        written.assign(float(here().replica_id_in_sync_group))

    strategy.run(step)

    for variable in (local, written):
        for use in (variable.read_value, lambda v=variable: v + 1, lambda v=variable: torch.exp(v)):  # type: ignore[misc]
            with pytest.raises(UsageError, match=r"none.*strategy\.local_results"):
                use()
        assert len(strategy.local_results(variable)) == 2
        assert variable.shape == ()
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
    strategy.run(lambda: first + second)  # they are known to the strategy by identity
