"""StepsInFlight and RunningLoss: what has arrived is taken at once, what has not two steps later, in order."""

from __future__ import annotations

import math

import pytest
import torch
from tests.stand_in import stand_in_gpus

from lockstep.errors import NonFiniteLossError
from lockstep.replicas.device.async_scalars import AsyncScalars
from lockstep.train.logs import MOST_AHEAD, RunningLoss, StepsInFlight, naming_step


def test_steps_are_heard_of_in_order_and_two_late_at_the_most():
    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        steps = StepsInFlight()
        for step, total in enumerate([1.0, math.nan, math.inf], start=1):
            steps.add(AsyncScalars([torch.tensor(total)], devices[0]), epoch=2, step=step)
        assert driver.waits == 1  # for the first, with two behind it
        with pytest.raises(NonFiniteLossError, match=r"^epoch 3, step 2: the loss is nan; "):
            steps.add(AsyncScalars([0.0], devices[0]), epoch=2, step=MOST_AHEAD + 2)
        assert steps.any
        with pytest.raises(NonFiniteLossError, match=r"^epoch 3, step 3: the loss is inf; "):
            steps.settle()
        steps.settle()
        assert not steps.any


def test_what_has_arrived_is_heard_of_at_once():
    steps = StepsInFlight()
    steps.add(AsyncScalars([1.0], None), epoch=0, step=1)
    assert not steps.any
    with pytest.raises(NonFiniteLossError, match=r"^epoch 1, step 2: "):
        steps.add(AsyncScalars([math.nan], None), epoch=0, step=2)


def test_only_a_loss_that_is_not_finite_is_located():
    with pytest.raises(ValueError, match=r"^plain$"), naming_step(0, 1):
        raise ValueError("plain")


def test_a_loss_is_the_same_read_early_late_or_not_at_all_meanwhile():
    pairs = [(0.1 * step, float(step)) for step in range(1, 9)]
    known = RunningLoss()
    for total, count in pairs:
        known.add(AsyncScalars([total, count, total], None), pairs=1)

    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        late = RunningLoss()
        moments = []
        for total, count in pairs:
            late.add(AsyncScalars([torch.tensor(total, dtype=torch.float64), count, 0.0], devices[0]), pairs=1)
            moments.append(late.now())
        assert not moments[0].arrived
        assert driver.waits == 0
        assert late.final() == known.value
        assert driver.waits == len(pairs)
        assert moments[0].value == pairs[0][0] / pairs[0][1]
        assert moments[-1].value == known.value
        assert (late.total, late.count) == (known.total, known.count)
