"""RunningLoss: what has arrived is taken at once, what has not two steps later, in order."""

from __future__ import annotations

import math

import pytest
import torch
from tests.stand_in import stand_in_gpus

from lockstep.errors import NonFiniteLossError
from lockstep.replicas.device.async_scalars import AsyncScalars
from lockstep.train.logs import MOST_AHEAD, RunningLoss, naming_step


def test_steps_are_heard_of_in_order_and_two_late_at_the_most():
    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        steps = RunningLoss()
        for step, total in enumerate([1.0, math.nan, math.inf], start=1):
            steps.add(AsyncScalars([torch.tensor(total)], devices[0]), epoch=2, step=step)
        assert driver.waits == 1  # for the first, with two behind it
        with pytest.raises(NonFiniteLossError, match=r"^epoch 3, step 2: the loss is nan; "):
            steps.add(AsyncScalars([0.0], devices[0]), epoch=2, step=MOST_AHEAD + 2)
        assert not steps.arrived
        with pytest.raises(NonFiniteLossError, match=r"^epoch 3, step 3: the loss is inf; "):
            steps.settle()
        steps.settle()
        assert steps.arrived


def test_what_has_arrived_is_heard_of_at_once():
    steps = RunningLoss()
    steps.add(AsyncScalars([1.0], None), epoch=0, step=1)
    assert steps.arrived
    with pytest.raises(NonFiniteLossError, match=r"^epoch 1, step 2: "):
        steps.add(AsyncScalars([math.nan], None), epoch=0, step=2)


def test_only_a_loss_that_is_not_finite_is_located():
    with pytest.raises(ValueError, match=r"^plain$"), naming_step(0, 1):
        raise ValueError("plain")


def test_a_loss_is_the_same_read_early_late_or_not_at_all_meanwhile():
    pairs = [(0.1 * step, float(step)) for step in range(1, 9)]
    known = RunningLoss()
    for total, count in pairs:
        known.add(AsyncScalars([total, count, total], None), epoch=0, step=1)

    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        late = RunningLoss()
        moments = []
        for total, count in pairs:
            numbers = AsyncScalars([torch.tensor(total, dtype=torch.float64), count, 0.0], devices[0])
            late.add(numbers, epoch=0, step=1)
            moments.append(late.now())
        assert not moments[-1].arrived
        assert driver.waits == len(pairs) - MOST_AHEAD
        assert late.final() == known.value
        assert driver.waits == len(pairs)
        assert moments[0].value == pairs[0][0] / pairs[0][1]
        assert moments[-1].value == known.value
        assert (late.total, late.count) == (known.total, known.count)
