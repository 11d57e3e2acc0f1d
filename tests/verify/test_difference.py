from __future__ import annotations

import math

import pytest
import torch

from lockstep.verify.compare import NOISE_FACTOR, ROUNDING_UNITS, Difference, Tolerance, tensor_difference

UNIT = 2.0**-23


def difference(amount: float, *, size: float = 2.0) -> Difference:
    return Difference(step=1, kind="gradient", name="w", amount=amount, size=size)


def test_the_largest_difference_is_relative_to_the_largest_value():
    found = tensor_difference(1, "weight", "w", torch.tensor([1.0, -4.0]), torch.tensor([1.5, -8.0]))

    assert (found.amount, found.size, found.relative) == (4.0, 8.0, 0.5)


def test_a_missing_tensor_counts_as_zeros_and_another_shape_cannot_be_compared():
    one = torch.ones(2)

    assert tensor_difference(1, "gradient", "w", None, one).amount == 1
    assert tensor_difference(1, "gradient", "w", one, None).amount == 1
    assert tensor_difference(1, "weight", "w", torch.ones(3), one).amount == math.inf
    assert tensor_difference(1, "weight", "w", one * math.nan, one).amount == math.inf


def test_rounding_is_granted_relative_to_the_size_or_as_measured():
    edge = ROUNDING_UNITS * UNIT * 2.0

    assert Tolerance(unit=UNIT).covers(difference(edge))
    assert not Tolerance(unit=UNIT).covers(difference(1.01 * edge))
    measured = Tolerance(unit=UNIT, noise={(1, "gradient", "w"): edge})
    assert measured.covers(difference(NOISE_FACTOR * edge))
    assert not measured.covers(difference(1.01 * NOISE_FACTOR * edge))


@pytest.mark.parametrize("amount", [1.0, 1e-9])
def test_rows_are_never_rounding(amount: float):
    assert not Tolerance(unit=1.0).covers(Difference(step=1, kind="rows", name="x", amount=amount, size=8.0))
