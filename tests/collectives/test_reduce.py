from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.collectives.reduce import ReduceOp, gather_across, reduce_across, sum_tensors
from lockstep.errors import ConfigError

EMPTY = torch.zeros(0)


def reduced(op: str, values: list[Any], axis: int | None) -> Any:
    return reduce_across(SingleWorkerCommunicator(len(values)), ReduceOp.of(op), values, axis)


def gathered(values: list[torch.Tensor], axis: int) -> torch.Tensor:
    return gather_across(SingleWorkerCommunicator(len(values)), "gather", values, axis)


@pytest.mark.parametrize("op", ["sum", "SUM", ReduceOp.SUM])
def test_an_operation_by_any_of_its_names(op: ReduceOp | str):
    assert ReduceOp.of(op) is ReduceOp.SUM


@pytest.mark.parametrize("op", ["max", None, 3])
def test_an_unknown_operation_lists_the_known(op: Any):
    with pytest.raises(ConfigError, match=r"unknown reduction .*; choose one of 'sum', 'mean' or a ReduceOp"):
        ReduceOp.of(op)


@pytest.mark.parametrize(
    ("op", "values", "axis", "expected"),
    [
        ("sum", [1.0, 2.0], None, 3.0),
        ("mean", [1, 2], None, 1.5),
        ("sum", [True, False, True], None, 2),
        ("sum", [torch.tensor(1.0), torch.tensor(2.0)], None, torch.tensor(3.0)),
        ("mean", [torch.tensor([1, 2]), torch.tensor([2, 4])], None, torch.tensor([1.5, 3.0])),
        ("sum", [torch.tensor([True]), torch.tensor([True])], None, torch.tensor([2])),
        ("sum", [torch.tensor(1.0), 2], None, torch.tensor(3.0)),
        # api.md: uneven shards come out right
        ("sum", [[0.0], [1.0, 1.0]], 0, torch.tensor(2.0)),
        ("mean", [[0.0], [1.0, 1.0]], 0, torch.tensor(2 / 3)),
        ("mean", [torch.tensor([3.0]), EMPTY], 0, torch.tensor(3.0)),
        ("mean", [torch.tensor([1, 2]), torch.tensor([6])], 0, torch.tensor(3.0)),
        ("mean", [torch.ones(2, 1), torch.zeros(2, 3)], 1, torch.tensor([0.25, 0.25])),
        ("sum", [torch.ones(2, 1), torch.ones(2, 3)], -1, torch.tensor([4.0, 4.0])),
    ],
)
def test_reductions(op: str, values: list[Any], axis: int | None, expected: Any):
    result = reduced(op, values, axis)
    assert isinstance(result, torch.Tensor) == isinstance(expected, torch.Tensor)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("values", "axis", "message"),
    [
        ([torch.ones(2), torch.ones(3)], None, r"shapes \(2,\), \(3,\).*or name the axis"),
        ([torch.ones(2, 3), torch.ones(2, 4)], 0, r"shapes \(3,\), \(4,\)"),
        ([torch.ones(2)], 1, "axis 1 does not exist in a value of shape .*choose 0 to 0"),
        ([torch.ones(())], 0, "give values of at least one dimension"),
        (["text"], None, "cannot reduce a str"),
    ],
)
def test_values_that_cannot_be_reduced(values: list[Any], axis: int | None, message: str):
    with pytest.raises(ConfigError, match=message):
        reduced("sum", values, axis)


def test_a_sum_is_a_tensor_of_its_own():
    only = torch.ones(2)
    assert sum_tensors([only]).data_ptr() != only.data_ptr()


def test_a_sum_is_added_in_replica_order():
    values = [torch.tensor(value) for value in (1e8, 1.0, -1e8)]
    assert float(sum_tensors(values)) == float((values[0] + values[1]) + values[2])


def test_gather_keeps_the_order_and_takes_empty_shards():
    whole = gathered([torch.tensor([[1, 2]]), torch.zeros(0, 2, dtype=torch.long), torch.tensor([[3, 4]])], 0)
    assert whole.tolist() == [[1, 2], [3, 4]]
    assert gathered([torch.ones(2, 1), torch.zeros(2, 2)], -1).shape == (2, 3)


@pytest.mark.parametrize(
    ("values", "axis", "message"),
    [
        ([torch.ones(1, 2), torch.ones(1, 3)], 0, "they may differ in that dimension only"),
        ([torch.ones(2), torch.ones(1, 2)], 0, "they may differ in that dimension only"),
        ([torch.ones(()), torch.ones(())], 0, "axis 0 does not exist"),
        ([torch.ones(2)], 5, "axis 5 does not exist"),
    ],
)
def test_values_that_cannot_be_gathered(values: list[torch.Tensor], axis: int, message: str):
    with pytest.raises(ConfigError, match=message):
        gathered(values, axis)
