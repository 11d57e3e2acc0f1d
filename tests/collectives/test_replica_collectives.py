"""all_reduce and all_gather between replicas: values, and gradients against one device's autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import CollectiveError, ConfigError


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_of_all_reduce_is_that_of_one_device(op: str, make_strategy: MakeStrategy):
    values = inputs((3,), (3,), (3,))

    def loss(replica: int, reduced: Tensor) -> Tensor:
        return ((replica + 1) * reduced.square()).sum()  # another loss on every replica

    def step(value: Tensor) -> Tensor:
        loss(here().replica_id_in_sync_group, here().all_reduce(op, value)).backward()
        return value.grad  # type: ignore[return-value]

    gradients = make_strategy(3).run(step, (PerReplica(values),)).values

    alone = [value.detach().clone().requires_grad_() for value in values]
    stacked = torch.stack(alone)
    reduced = stacked.sum(0) if op == "sum" else stacked.mean(0)
    torch.stack([loss(replica, reduced) for replica in range(3)]).sum().backward()
    torch.testing.assert_close(gradients, tuple(value.grad for value in alone))


@pytest.mark.parametrize("shapes", [((2, 3), (1, 3), (4, 3)), ((2, 3), (0, 3), (1, 3))])
@pytest.mark.parametrize("axis", [0, -2])
def test_the_gradient_of_an_uneven_all_gather_is_that_of_one_device(
    shapes: tuple[tuple[int, int], ...], axis: int, make_strategy: MakeStrategy
):
    values = inputs(*shapes)
    weight = torch.arange(sum(shape[0] for shape in shapes), dtype=torch.float64).unsqueeze(1) + 1

    def loss(replica: int, gathered: Tensor) -> Tensor:
        return (replica + 1) * (weight * gathered.square()).sum()

    def step(value: Tensor) -> tuple[Tensor, Tensor]:
        gathered = here().all_gather(value, axis)
        loss(here().replica_id_in_sync_group, gathered).backward()
        assert value.grad is not None
        return gathered.detach(), value.grad

    gathered, gradients = make_strategy(3).run(step, (PerReplica(values),))

    alone = [value.detach().clone().requires_grad_() for value in values]
    together = torch.cat(alone)
    torch.stack([loss(replica, together) for replica in range(3)]).sum().backward()
    torch.testing.assert_close(gradients.values, tuple(value.grad for value in alone))
    assert all(torch.equal(each, together) for each in gathered)


def test_collectives_take_structures_and_numbers(make_strategy: MakeStrategy):
    def step() -> tuple[object, ...]:
        replica = here().replica_id_in_sync_group
        reduced = here().all_reduce("sum", {"a": [torch.tensor(replica)], "b": (replica + 1.5, torch.tensor(True))})
        gathered = here().all_gather({"rows": torch.full((replica, 2), replica)}, axis=0)
        return reduced["a"][0], reduced["b"][0], reduced["b"][1], gathered["rows"]

    total, number, count, rows = make_strategy(3).run(step)

    assert [int(value) for value in total] == [3, 3, 3]
    assert number == 7.5
    assert [int(value) for value in count] == [3, 3, 3]
    assert [value.tolist() for value in rows] == [[[1, 1], [2, 2], [2, 2]]] * 3


def test_each_replica_gets_a_copy_of_its_own(make_strategy: MakeStrategy):
    def step() -> Any:
        replica = here().replica_id_in_sync_group
        mine = here().all_reduce("sum", torch.ones(2))
        mine += replica
        here().all_reduce("sum", 0)  # all have written
        return mine

    assert [value.tolist() for value in make_strategy(3).run(step)] == [[3, 3], [4, 4], [5, 5]]


def test_shapes_that_do_not_fit_are_an_error_of_the_arguments(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    uneven = PerReplica([torch.ones(1, 2), torch.ones(2, 3)])
    with pytest.raises(ConfigError, match=r"cannot add values of shapes \(1, 2\), \(2, 3\)"):
        strategy.run(lambda value: here().all_reduce("sum", value), (uneven,))
    with pytest.raises(ConfigError, match="they may differ in that dimension only"):
        strategy.run(lambda value: here().all_gather(value, 0), (uneven,))
    with pytest.raises(ConfigError, match="unknown reduction 'max'"):
        strategy.run(lambda value: here().all_reduce("max", value), (1,))


def test_a_backward_pass_that_a_replica_leaves_out_is_an_error(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step(value: Tensor) -> None:
        reduced = here().all_reduce("sum", value)
        if here().replica_id_in_sync_group == 0:
            reduced.sum().backward()

    with pytest.raises(
        CollectiveError,
        match=r"replica 0 \(cpu:0\) waits in all_reduce\(sum\) backward .*replica 1 \(cpu:1\) has returned",
    ):
        strategy.run(step, (PerReplica(inputs((2,), (2,))),))
    assert strategy.run(lambda: here().all_reduce("sum", 1)) == 2


def test_a_backward_pass_after_the_run_is_an_error_and_not_a_hang(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    losses = strategy.run(lambda value: here().all_reduce("sum", value).sum(), (PerReplica(inputs((2,), (2,))),))
    with pytest.raises(CollectiveError, match="has returned"):
        losses[0].backward()


def test_without_gradients_there_is_no_graph(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with torch.no_grad():
        reduced = strategy.run(lambda value: here().all_reduce("sum", value), (PerReplica(inputs((2,), (2,))),))
    assert not any(value.requires_grad for value in reduced)
