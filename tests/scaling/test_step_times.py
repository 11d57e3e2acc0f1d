from __future__ import annotations

from dataclasses import asdict

import pytest

from lockstep.mirroring.optim.update import UpdateTimes
from lockstep_tools.scaling.measure import PARTS, ReplicaMarks, mean_times, step_times


def marks(began: float, forward: float, backward: float, settled: float) -> ReplicaMarks:
    return ReplicaMarks(began_s=began, forward_s=forward, backward_s=backward, finished_s=settled)


def update(arrived: float, opened: float, exchanged: float, updated: float, closed: float) -> UpdateTimes:
    return UpdateTimes(arrived_s=arrived, opened_s=opened, exchanged_s=exchanged, updated_s=updated, closed_s=closed)


def test_two_replicas_of_which_one_is_slower():
    times = step_times(
        requested_s=10.0,
        received_s=10.5,
        ended_s=20.0,
        replicas=[marks(11.0, 13.0, 16.0, 19.5), marks(11.0, 14.0, 17.5, 19.5)],
        updates=[update(16.0, 18.0, 18.25, 18.5, 19.0), update(17.5, 18.0, 18.25, 18.75, 19.0)],
    )

    assert asdict(times) == pytest.approx(
        {
            "step": 10_000,
            "input": 500,
            "forward": 2_500,  # 2 and 3 s
            "backward": 3_250,  # 3 and 3.5 s
            "exchange": 250,
            "update": 375 + 500,  # 0.25 and 0.5 s, and clearing the gradients
            "waiting": 750 + 125,  # replica 0 waits 1.5 s longer before, and 0.25 s longer after
            "other": 1_750,  # starting, both meetings, the end
        }
    )


def test_a_replica_that_waits_for_a_turn_waits():
    times = step_times(
        requested_s=0.0,
        received_s=0.0,
        ended_s=3.0,
        replicas=[marks(0.0, 1.0, 1.0, 3.0), marks(2.0, 3.0, 3.0, 3.0)],
        updates=[update(1.0, 3.0, 3.0, 3.0, 3.0), update(3.0, 3.0, 3.0, 3.0, 3.0)],
    )
    assert (times.forward, times.waiting, times.other) == pytest.approx((1_000, 2_000, 0))


def test_one_replica_waits_for_nobody():
    times = step_times(
        requested_s=0.0,
        received_s=0.0,
        ended_s=4.0,
        replicas=[marks(0.0, 1.0, 2.0, 4.0)],
        updates=[update(2.0, 2.5, 2.5, 3.0, 3.5)],
    )
    assert (times.waiting, times.other) == pytest.approx((0, 1_000))


def test_a_skipped_update_is_other_time():
    times = step_times(
        requested_s=0.0, received_s=0.0, ended_s=3.0, replicas=[marks(0.0, 1.0, 2.0, 3.0)], updates=[None]
    )
    assert (times.exchange, times.update, times.other) == pytest.approx((0, 0, 1_000))


def test_the_mean_of_the_parts_adds_up_to_the_mean_step(make):
    mean = mean_times([make.times(100.0, input=3.0, forward=40.0), make.times(120.0, backward=51.0, waiting=7.0)])
    assert mean.step == 110
    assert sum(getattr(mean, part) for part in PARTS) == pytest.approx(mean.step)
    assert (mean.input, mean.backward) == (1.5, 25.5)
