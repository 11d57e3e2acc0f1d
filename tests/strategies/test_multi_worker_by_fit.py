"""Workers of real processes over gloo, each with its replicas: fit, evaluate and predict against one device by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.workers


class OneDevice(NamedTuple):
    """What the loop by hand has trained, and the loss and accuracy of each epoch."""

    module: nn.Module
    losses: list[float]
    accuracies: list[float]


@pytest.fixture(scope="module")
def one_device(program: Any) -> OneDevice:
    module = program.net()
    optimizer = program.OPTIMIZERS["adamw"](module.parameters())
    means, accuracies = [], []
    for _ in range(2):
        total, count, right, rows_seen = 0.0, 0, 0, 0
        for index, (x, y, weight) in enumerate(program.batches()):
            outputs = module(x)
            loss = (program.per_example(outputs, y) * weight).sum()
            loss.backward()
            total, count = total + loss.item(), count + len(x)
            right, rows_seen = right + int((outputs.argmax(1) == y).sum()), rows_seen + len(x)
            if index % 2:
                cycle = program.SIZES[index - 1] + program.SIZES[index]
                for parameter in module.parameters():
                    parameter.grad /= cycle
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        means.append(total / count)
        accuracies.append(right / rows_seen)
    return OneDevice(module, means, accuracies)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_fit_is_the_loop_on_one_device(result: dict[str, Any], program: Any, one_device: OneDevice):
    assert_close(result["fit"]["weights"], one_device.module.state_dict())
    assert_close(result["fit"]["history"]["loss"], one_device.losses)
    # torchmetrics' is float32.
    assert result["fit"]["history"]["accuracy"] == pytest.approx(one_device.accuracies, abs=1e-7)
    assert result["fit"]["examples"] == [sum(program.SIZES)] * 2


def test_callbacks_hear_the_loss_and_metrics_of_all_workers(result: dict[str, Any]):
    last = result["fit"]["batches"][-1]

    assert last["loss"] == pytest.approx(result["fit"]["history"]["loss"][-1])
    assert last["f1"] == pytest.approx(result["fit"]["history"]["f1"][-1])


def test_evaluate_counts_every_example_once(result: dict[str, Any], program: Any, one_device: OneDevice):
    x, y = torch.cat([x for x, _, _ in program.batches()]), torch.cat([y for _, y, _ in program.batches()])
    weight = torch.cat([weight for _, _, weight in program.batches()])
    expected = {"loss": ((program.per_example(one_device.module(x), y) * weight).sum() / len(x)).item()}
    for name, metric in program.metrics().items():
        expected[name] = metric(one_device.module(x), y).item()

    assert_close(result["fit"]["evaluate"], expected)


def test_predict_gives_all_rows_in_the_order_of_the_data(result: dict[str, Any], program: Any, one_device: OneDevice):
    assert_close(result["fit"]["predict"], one_device.module(torch.cat([x for x, _, _ in program.batches()])).detach())
