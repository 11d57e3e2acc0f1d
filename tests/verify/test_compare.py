from __future__ import annotations

import math

import pytest
import torch

from lockstep_tools.verify.compare import (
    NOISE_FACTOR,
    ROUNDING_UNITS,
    Difference,
    GradientFit,
    Tolerance,
    compare_batches,
    fit_gradients,
    shard_sizes,
    summed_gradients,
    tensor_difference,
)
from lockstep_tools.verify.trace import BatchRecord, StepTrace, UpdateRecord


def batch(*replicas: tuple[int, ...]) -> BatchRecord:
    return BatchRecord(arguments={(1, "x"): replicas})


@pytest.mark.parametrize(
    ("ours", "reference", "verdict", "common"),
    [
        (batch((1, 2), (3,)), batch((1, 2, 3)), "same", 3),
        (batch((1, 2), (3,), ()), batch((1, 2, 3)), "same", 3),
        (batch((1, 2), (1, 2)), batch((1, 2)), "undistributed", 2),
        (batch((1, 2), (3, 4)), batch((1, 2)), "scaled", 2),
        (batch((2, 1), (3,)), batch((1, 2, 3)), "reordered", 3),
        (batch((1, 4), (3,)), batch((1, 2, 3)), "different", 2),
    ],
)
def test_the_verdict_on_one_batch(ours: BatchRecord, reference: BatchRecord, verdict: str, common: int):
    found = compare_batches([ours], [reference])
    assert (found.verdict, found.common) == (verdict, common)


def test_another_number_of_batches_is_counted():
    found = compare_batches([batch((1,)), batch((2,))], [batch((1,))])
    assert (found.verdict, found.batches) == ("count", (2, 1))


def test_a_constant_beside_divided_rows_is_no_fault():
    constant = {(1, "weights"): ((7, 8), (7, 8))}
    ours = BatchRecord(arguments={**constant, **batch((1,), (2,)).arguments})
    reference = BatchRecord(arguments={(1, "weights"): ((7, 8),), **batch((1, 2)).arguments})
    assert compare_batches([ours], [reference]).verdict == "same"
    assert compare_batches([ours], [reference]).name == "x"
    assert shard_sizes([ours]) == (1, 1)


def test_a_batch_that_came_past_the_arguments_is_known_by_what_the_module_got():
    ours = BatchRecord(arguments={(1, "weights"): ((7, 8), (7, 8))}, inputs=batch((1,), (2,)).arguments)
    reference = BatchRecord(arguments={(1, "weights"): ((7, 8),)}, inputs=batch((1, 2)).arguments)
    assert compare_batches([ours], [reference]).verdict == "same"


def test_shards_of_an_accumulated_update_are_added_up():
    assert shard_sizes([batch((1, 2), (3,)), batch((4,), ())]) == (3, 1)
    assert shard_sizes([BatchRecord()]) is None


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


PARTS = ({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -1.0])})
BEFORE = {"w": torch.tensor([10.0, 20.0])}


def update(*gradients: dict[str, torch.Tensor], counts: tuple[float, ...] = (1.0, 0.0)) -> UpdateRecord:
    replicas = (StepTrace(gradients=own, count=count) for own, count in zip(gradients, counts, strict=False))
    return UpdateRecord(step=1, replicas=tuple(replicas), buffers={})


def explaining(reference: torch.Tensor, shards: tuple[int, ...] | None = (3, 1)) -> dict[str, GradientFit]:
    found = fit_gradients(update(*PARTS), {"w": reference.double()}, shards, BEFORE)
    return {each.kind: each for each in found if max(left.amount for left in each.residuals) < 1e-9}


def test_gradients_are_summed_and_divided_once_by_the_count():
    assert torch.equal(summed_gradients(update(*PARTS, counts=(3.0, 1.0)))["w"], torch.tensor([1.0, 0.25]).double())


def test_a_gradient_of_one_replica_alone_counts():
    assert torch.equal(summed_gradients(update({}, PARTS[1]))["w"], PARTS[1]["w"].double())


def test_means_over_shards_are_explained_by_their_shares():
    assert list(explaining(0.75 * PARTS[0]["w"] + 0.25 * PARTS[1]["w"])) == ["shares", "per replica"]


def test_a_common_factor_is_found():
    found = explaining(0.5 * (PARTS[0]["w"] + PARTS[1]["w"]), shards=None)
    assert list(found) == ["uniform", "per replica"]
    assert found["uniform"].factors == pytest.approx((0.5, 0.5))


def test_a_penalty_of_the_weights_that_each_replica_adds_is_found():
    found = explaining(PARTS[0]["w"] + PARTS[1]["w"] - 0.3 * BEFORE["w"])
    assert found["weight penalty"].penalty == pytest.approx(0.3)


def test_an_empty_shard_has_no_factor_that_matters():
    gradients = (PARTS[0], {"w": torch.zeros(2)})
    found = fit_gradients(update(*gradients), {"w": 2 * PARTS[0]["w"].double()}, (4, 0), BEFORE)
    assert found[-1].factors == pytest.approx((2.0, 0.0))


def test_what_no_weights_explain_is_left():
    gradients = ({"w": torch.tensor([1.0, 0.0, 0.0])}, {"w": torch.tensor([0.0, 1.0, 0.0])})
    found = fit_gradients(update(*gradients), {"w": torch.tensor([0.0, 0.0, 1.0]).double()}, (1, 1), {})
    assert min(max(left.amount for left in each.residuals) for each in found) == pytest.approx(1.0)
