from __future__ import annotations

import pytest
import torch

from lockstep.verify.compare import GradientFit, fit_gradients, summed_gradients
from lockstep.verify.trace import StepTrace, UpdateRecord

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
