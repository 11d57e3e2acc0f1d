"""Workers of real processes over gloo, each with its replicas: fit, evaluate and predict against one device by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import oracle
from tests.oracle import assert_close
from torch import Tensor

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def right() -> list[float]:
    """How many rows of each batch one device classifies right."""
    return []


@pytest.fixture(scope="module")
def one_device(program: Any, right: list[float]) -> oracle.Training:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        right.append(float((outputs.argmax(1) == targets).sum()))
        return program.per_example(outputs, targets)

    adamw = program.OPTIMIZERS["adamw"]
    return oracle.train(program.net(), program.batches(), adamw, loss, epochs=2, accumulate=2, clip_norm=0.5)


def test_fit_is_the_loop_on_one_device(
    result: dict[str, Any], program: Any, one_device: oracle.Training, right: list[float]
):
    assert_close(result["fit"]["weights"], one_device.module)
    assert_close(result["fit"]["history"]["loss"], one_device.epoch_losses(2))
    rows, batches = sum(program.SIZES), len(program.SIZES)
    accuracies = [sum(right[:batches]) / rows, sum(right[batches:]) / rows]
    assert result["fit"]["history"]["accuracy"] == pytest.approx(accuracies, abs=1e-7)  # torchmetrics' is float32
    assert result["fit"]["examples"] == [sum(program.SIZES)] * 2


def test_callbacks_hear_the_loss_and_metrics_of_all_workers(result: dict[str, Any]):
    last = result["fit"]["batches"][-1]
    assert last["loss"] == pytest.approx(result["fit"]["history"]["loss"][-1])
    assert last["f1"] == pytest.approx(result["fit"]["history"]["f1"][-1])


def test_evaluate_counts_every_example_once(result: dict[str, Any], program: Any, one_device: oracle.Training):
    x, y = torch.cat([x for x, _, _ in program.batches()]), torch.cat([y for _, y, _ in program.batches()])
    weight = torch.cat([weight for _, _, weight in program.batches()])
    expected = {"loss": ((program.per_example(one_device.module(x), y) * weight).sum() / len(x)).item()}
    for name, metric in program.metrics().items():
        expected[name] = metric(one_device.module(x), y).item()
    assert_close(result["fit"]["evaluate"], expected)


def test_predict_gives_all_rows_in_the_order_of_the_data(
    result: dict[str, Any], program: Any, one_device: oracle.Training
):
    assert_close(result["fit"]["predict"], one_device.module(torch.cat([x for x, _, _ in program.batches()])).detach())
