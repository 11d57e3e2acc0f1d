"""The same replicas on any layout of processes and devices have the same bits after every step.

Weights, optimizer states, buffers, random numbers, losses, metrics and all that collectives return are compared by
hashes. A control sums the gradients by a plain all-reduce, and must be told from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_close, train
from tests.tiers import partly_slow

pytestmark = pytest.mark.workers

ONE_DEVICE = "1 process with 1 device"
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # each worker's devices, and its replicas
    "1 process with 4 devices": ((4,), (4,)),
    "2 + 2": ((1, 2), (2, 2)),
    "1 + 1 + 1 + 1": ((1, 1, 1, 1), (1, 1, 1, 1)),
    "2 + 1 + 1": ((1, 1, 1), (2, 1, 1)),
}
"""Beside ``ONE_DEVICE``, which they are compared with."""
CONTROL = "control: all_reduce"


@pytest.fixture(scope="module")
def one_device(run_layout: Callable[..., Any]) -> Any:
    return run_layout((1,), (4,), "loops")


@pytest.mark.parametrize("layout", partly_slow(LAYOUTS, "2 + 1 + 1"))
def test_every_step_has_the_bits_of_one_device(layout: str, run_layout: Callable[..., Any], one_device: Any):
    differences = run_layout(*LAYOUTS[layout], "loops").differences(one_device)
    # The sums of a plain all-reduce are another layout's after the first step: a last bit is enough to be seen.
    control = differences.pop(CONTROL, "")
    assert differences == {}
    assert control.startswith("step 0: by_hand") or layout == "1 process with 4 devices"


def test_eight_replicas_on_three_workers_have_the_bits_of_one_device(run_layout: Callable[..., Any]):
    one = run_layout((1,), (8,), "few")
    assert run_layout((1, 1, 1), (3, 3, 2), "few").differences(one) == {}


def test_an_own_loop_has_the_numbers_of_a_loop_by_hand(one_device: Any, trainings: Any):
    case = trainings.OWN_LOOPS[trainings.EXACT]
    alone = train(case.net(), case.data(), case.optimizer, trainings.per_example, clip_norm=case.clip)
    assert_close(one_device.results[trainings.EXACT], alone.module.state_dict(), 1e-10)


def test_fit_has_the_numbers_of_a_loop_by_hand(one_device: Any, trainings: Any):
    name = f"fit: {trainings.EXACT}"
    case = trainings.FITS[name]
    data = case.data()
    alone = train(case.net(), data, case.optimizer, trainings.per_example, epochs=2, **case.settings)
    module = alone.module

    found = one_device.results[name]
    assert_close(found["weights"], module.state_dict(), 1e-10)
    assert_close(found["history"]["loss"], alone.epoch_losses(2), 1e-10)
    expected, targets = module(torch.cat([x for x, _, _ in data])).detach(), torch.cat([y for _, y, _ in data])
    assert_close(found["predict"], expected, 1e-10)
    for name, metric in trainings.metrics().items():
        assert found["evaluate"][name] == pytest.approx(metric(expected, targets).item(), abs=1e-6)
