from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.train.loss_totals import loss_sums, no_examples


def sums(returned: object, rows: int, weight: torch.Tensor | None = None) -> tuple[float, float]:
    total, count = loss_sums(returned, rows, weight)
    return float(total), float(count)


@pytest.mark.parametrize(
    ("values", "rows", "weight", "expected"),
    [
        ([1.0, 2.0, 3.0], 3, None, (6.0, 3.0)),
        (torch.ones(2, 3, 4).tolist(), 2, None, (24.0, 24.0)),  # every value counts
        ([5.0], 1, None, (5.0, 1.0)),  # one row is no scalar
        (2.5, 4, None, (10.0, 4.0)),  # a scalar is the mean over the rows
        ([1.0, 4.0], 2, [2.0, 0.5], (4.0, 2.0)),  # weights multiply the values and not the count
        ([1.0, 4.0], 2, [[2.0], [0.5]], (4.0, 2.0)),
        ([1.0, 4.0], 2, [[[2.0]], [[0.5]]], (4.0, 2.0)),
        ([[1.0] * 3] * 2, 2, [2.0, 1.0], (9.0, 6.0)),  # they go for all values of a row, or for each
        ([[1.0] * 2] * 2, 2, [[1.0, 0.0], [0.0, 0.0]], (1.0, 4.0)),
    ],
)
def test_values_are_summed_and_counted(values: Any, rows: int, weight: Any, expected: tuple[float, float]):
    assert sums(torch.tensor(values), rows, None if weight is None else torch.tensor(weight)) == expected


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3])])
def test_a_pair_is_taken_as_it_is(count: object):
    assert sums((torch.tensor(6.0), count), 2) == (6.0, 3.0)


def test_the_total_carries_the_gradient():
    values = torch.ones(3, requires_grad=True)
    loss_sums(values * 2, 3)[0].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype):
    total, count = loss_sums(torch.full((4096,), 1.0, dtype=dtype), 4096)
    assert total.dtype == torch.float32
    assert (float(total), count) == (4096.0, 4096.0)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 2)])
def test_a_sample_weight_that_does_not_fit_is_named(shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"has shape .*the losses have \(2,\)"):
        loss_sums(torch.ones(2), 2, torch.ones(shape))


@pytest.mark.parametrize("returned", [torch.tensor(1.0), (torch.tensor(1.0), 2)])
def test_a_reduced_loss_cannot_be_weighted(returned: object):
    with pytest.raises(ConfigError, match="sample_weight came with a loss that returns"):
        loss_sums(returned, 2, torch.ones(2))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(3), r"the loss returned shape \(3,\) for 2 examples; return a tensor with one value per example"),
        (torch.ones(1), r"the loss returned shape \(1,\) for 2 examples"),
        (1.0, "the loss returned float; return a tensor"),
        (None, "the loss returned NoneType; return a tensor"),
        ((torch.tensor(1.0),), r"a tuple of shape \(\); return a pair"),
        ((torch.ones(2), 2), r"a tuple of shape \(2,\), int; return a pair"),
        ((1.0, 2), "a tuple of float, int; return"),
        ((torch.tensor(1.0), torch.ones(2)), r"a tuple of shape \(\), shape \(2,\); return"),
        ((torch.tensor(1.0), "two"), r"a tuple of shape \(\), str; return"),
    ],
)
def test_other_shapes_and_types_are_one_line(returned: object, message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        loss_sums(returned, 2)
    assert "\n" not in str(raised.value)


def test_no_examples_is_a_zero_that_backward_runs_through():
    weight = torch.ones(3, 2, requires_grad=True)
    total, count = no_examples(torch.zeros(0, 3) @ weight)
    total.backward()
    assert (total.item(), count) == (0.0, 0.0)
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0
