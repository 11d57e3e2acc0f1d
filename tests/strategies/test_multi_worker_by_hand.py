"""Workers of real processes over gloo, each with its replicas: loops by hand, collectives and variables.

The expected numbers are those of hand-written loops on one device. One job of each layout computes everything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import oracle
from tests.oracle import assert_close
from torch import Tensor

pytestmark = pytest.mark.workers


def one_device(program: Any, name: str, *, norm: bool = False, **how: Any) -> oracle.Training:
    batches = program.normable() if norm else program.batches()
    pairs = [batch[:2] for batch in batches]
    return oracle.train(program.net(norm=norm), pairs, program.OPTIMIZERS[name], **{"loss": program.per_example} | how)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_loop_on_workers_is_the_loop_on_one_device(result: dict[str, Any], program: Any, name: str):
    expected = one_device(program, name)
    assert_close(result[name][1], expected.losses)
    assert_close(result[name][0], expected.module)


def test_synchronised_batch_norm_is_that_of_one_device(result: dict[str, Any], program: Any):
    expected = one_device(program, "sgd", norm=True)
    assert_close(result["sync batch norm"][1], expected.losses)
    assert_close(result["sync batch norm"][0], expected.module)


def test_gradients_that_are_added_up_by_hand_are_exchanged_whole(result: dict[str, Any], program: Any):
    def half(outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        return program.per_example(outputs, targets).sum(), 0.5  # the sum of two is not divided

    assert_close(result["twice"], one_device(program, "sgd", accumulate=2, loss=half).module)


def test_gradients_clipped_in_the_step_are_those_of_one_device(result: dict[str, Any], program: Any):
    expected = one_device(program, "sgd", clip_norm=0.1)
    assert_close(result["clipped in the step"][1], expected.norms)
    assert_close(result["clipped in the step"][0], expected.module)


def test_gradients_clipped_outside_without_their_sums_are_refused(result: dict[str, Any]):
    assert "sum_gradients" in result["clipped outside"]


def test_weights_updated_by_hand_in_the_step_are_those_of_one_device(result: dict[str, Any], program: Any):
    assert_close(result["by hand"], one_device(program, "plain").module)


def test_collectives_reach_all_replicas(result: dict[str, Any]):
    count, found = result["replicas"], result["collectives"]
    numbers = torch.arange(count)
    local = found["step"]["number"]

    assert_close(found["step"]["total"], torch.full((2,), float(((numbers + 1) ** 2).sum())))
    assert found["step"]["mean"] == pytest.approx((count - 1) / 2)
    assert found["step"]["gathered"].flatten().tolist() == [n for n in range(count) for _ in range(n)]
    assert_close(found["step"]["gradient"], torch.full((2,), 2.0 * (local + 1) * float((numbers + 1).sum())))
    assert_close(found["step"]["gather gradient"], torch.tensor([float(local * count)]))
    assert found["sum"] == count * (count - 1) / 2
    assert found["mean"] == (count - 1) / 2
    assert_close(found["mean of tensors"], torch.tensor([(count - 1) / 2]))
    assert found["plain"] == count
    everyones = torch.cat([torch.arange(float(n)) for n in range(count)])
    assert_close(found["gather"], everyones)
    assert_close(found["mean over axis"], everyones.mean())
    assert found["bools"].tolist() == [count, 0]


def test_variables_are_reduced_over_all_replicas_and_begin_with_the_chief_s_value(result: dict[str, Any]):
    total = result["replicas"] * (result["replicas"] - 1) / 2
    found = {"summed": total, "first": 5, "counter": total, "own": 3, "reduced": total, "assigned": 13}
    assert result["variables"] == found


def test_metrics_are_of_the_rows_of_all_replicas(result: dict[str, Any]):
    rows = [float(number) for number in range(result["replicas"]) for _ in range(number)]
    expected = sum(row**2 for row in rows) / len(rows)
    assert result["metrics"]["values"] == rows
    assert [*result["metrics"]["inside"], result["metrics"]["error"]] == pytest.approx([expected] * 2)


def test_all_workers_have_the_same_bits(result: dict[str, Any]):
    assert result["all alike"]


def test_the_same_layout_again_gives_the_same_bits_dropout_included(run_layout: Any, program: Any):
    first, again = run_layout("2 workers x 2"), run_layout.__wrapped__("2 workers x 2")
    assert program.digest(first) == program.digest(again)
