"""Variables: what a write in a replica, a read and a write outside mean for every aggregation (the rules of api.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.variable import MirroredVariable

ALL = ("none", "sum", "mean", "only_first")


def mine() -> float:
    """1, 2, 3 on the replicas."""
    return here().replica_id_in_sync_group + 1.0


def numbers(variable: MirroredVariable) -> list[float]:
    return [float(value) for value in variable.values]


@pytest.mark.parametrize(
    ("aggregation", "assigned", "added", "subtracted"),
    [
        ("none", [1, 2, 3], [11, 12, 13], [9, 8, 7]),
        ("sum", [6, 6, 6], [16, 16, 16], [4, 4, 4]),
        ("mean", [2, 2, 2], [12, 12, 12], [8, 8, 8]),
        ("only_first", [1, 1, 1], [11, 11, 11], [9, 9, 9]),
    ],
)
def test_a_write_in_a_replica_is_aggregated_first(
    aggregation: Any, assigned: list[float], added: list[float], subtracted: list[float], make_strategy: MakeStrategy
):
    strategy = make_strategy(3)
    for method, expected in (("assign", assigned), ("assign_add", added), ("assign_sub", subtracted)):
        variable = strategy.variable(10.0, aggregation=aggregation)
        strategy.run(lambda method=method, variable=variable: getattr(variable, method)(torch.tensor(mine())))
        assert numbers(variable) == expected
        if aggregation == "none":  # there is no one value
            with pytest.raises(UsageError, match=r"none.*local_results"):
                variable.read_value()
        else:
            assert float(variable.read_value()) == expected[0]


@pytest.mark.parametrize(("aggregation", "read"), [("sum", 6), ("mean", 2), ("only_first", 1)])
def test_on_read_is_local_until_it_is_read_outside(aggregation: Any, read: float, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    variable = strategy.variable(0.0, aggregation=aggregation, synchronization="on_read")
    seen = []

    def step() -> None:
        variable.assign_add(mine())
        seen.append((mine(), float(variable)))

    strategy.run(step)

    assert sorted(seen) == [(1, 1), (2, 2), (3, 3)]
    assert numbers(variable) == [1, 2, 3]
    assert float(variable) == read


def test_a_plain_value_cannot_be_summed(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(0.0, aggregation="sum")
    with pytest.raises(ValueError, match=r"the plain value 5.0 cannot be summed over replicas, .* give a tensor"):
        strategy.run(lambda: variable.assign(5.0))
    assert numbers(variable) == [0, 0]


@pytest.mark.parametrize("value", [3, torch.tensor(3)])
def test_the_mean_of_a_variable_that_is_not_floating_is_refused(value: Any, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(0, aggregation="mean")
    with pytest.raises(ValueError, match=r"a variable of dtype torch\.int64 cannot take the mean"):
        strategy.run(lambda: variable.assign(value))


def test_a_plain_value_may_be_averaged_and_taken_from_the_first(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    for aggregation, expected in (("mean", [2, 2, 2]), ("only_first", [1, 1, 1]), ("none", [1, 2, 3])):
        variable = strategy.variable(0.0, aggregation=aggregation)  # type: ignore[arg-type]
        strategy.run(lambda variable=variable: variable.assign(mine()))
        assert numbers(variable) == expected


def test_outside_a_write_reaches_all(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    for aggregation in ALL:
        variable = strategy.variable(1.0, aggregation=aggregation)  # type: ignore[arg-type]
        variable.assign(5.0)
        variable.assign_add(2.0)
        variable.assign_sub(torch.tensor(1.0))
        assert numbers(variable) == [6, 6, 6]
        with pytest.raises(ConfigError, match=r"on_write.*PerReplica.*reduce"):
            variable.assign(PerReplica([1.0, 2.0, 3.0]))
        with pytest.raises(ConfigError, match=r"on_write.*PerReplica.*reduce"):
            variable.assign_add(PerReplica([1.0, 2.0, 3.0]))
        assert numbers(variable) == [6, 6, 6]


def test_outside_an_on_read_sum_is_divided_and_not_added_to(make_strategy: MakeStrategy):
    variable = make_strategy(4).variable(0.0, aggregation="sum", synchronization="on_read")
    variable.assign(6.0)

    assert numbers(variable) == [1.5] * 4
    assert float(variable.read_value()) == 6.0
    for method in (variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match='outside a replica has no meaning for an "on_read" variable'):
            method(1.0)
    variable.assign(PerReplica([1.0, 2.0, 3.0, 4.0]))
    assert float(variable) == 10.0


@pytest.mark.parametrize("aggregation", ["none", "mean", "only_first"])
def test_outside_other_on_read_variables_are_written_whole(aggregation: Any, make_strategy: MakeStrategy):
    variable = make_strategy(2).variable(0.0, aggregation=aggregation, synchronization="on_read")
    variable.assign(6.0)
    variable.assign_add(1.0)
    assert numbers(variable) == [7, 7]
    if aggregation != "none":
        assert float(variable) == 7.0


def test_reading_gives_a_tensor_of_its_own(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(torch.ones(3))
    variable.read_value().zero_()
    strategy.run(lambda: variable.read_value().zero_())
    assert all(bool((value == 1).all()) for value in variable.values)


def test_the_value_of_the_first_is_taken_before_it_goes_on(make_strategy: MakeStrategy):
    strategy = make_strategy(4)
    variable = strategy.variable(torch.zeros(10_000), aggregation="only_first")

    def step() -> None:
        value = torch.ones(10_000)
        variable.assign(value)
        value.zero_()

    for _ in range(50):
        variable.assign(torch.zeros(10_000))
        strategy.run(step)
        assert all(bool((each == 1).all()) for each in variable.values)


def test_the_initial_value_is_copied_and_may_be_per_replica(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    given = torch.ones(2)
    variable = strategy.variable(given)
    given.zero_()
    assert [value.tolist() for value in variable.values] == [[1, 1], [1, 1]]
    assert numbers(strategy.variable(PerReplica([1.0, 2.0]))) == [1, 2]
    assert int(strategy.variable(7)) == 7
    assert repr(strategy.variable(7)) == "MirroredVariable(7, 7, aggregation='none', synchronization='on_write')"


@pytest.mark.parametrize(("name", "value"), [("aggregation", "max"), ("synchronization", "never")])
def test_unknown_settings_list_the_known(name: str, value: str, make_strategy: MakeStrategy):
    with pytest.raises(ValueError, match=f"{name}='{value}' is unknown; choose one of "):
        make_strategy(2).variable(0.0, **{name: value})  # type: ignore[arg-type]


def test_another_strategy_s_replica_cannot_use_it(make_strategy: MakeStrategy):
    variable = make_strategy(2).variable(0.0)
    with pytest.raises(UsageError, match="another strategy"):
        make_strategy(2).run(variable.read_value)


def test_inside_a_merge_call_it_is_as_outside(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    variable = strategy.variable(0.0, aggregation="sum", synchronization="on_read")

    def step() -> Tensor:
        variable.assign(torch.tensor(mine()))
        context = here()
        return context.merge_call(lambda _strategy: variable.read_value())  # type: ignore[no-any-return]

    assert float(strategy.run(step)) == 3.0


def test_a_value_that_is_trained_is_refused(make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match=r"\(4, 3\) that requires gradients.*strategy\.mirror"):
        make_strategy(2).variable(torch.zeros(4, 3, requires_grad=True))
