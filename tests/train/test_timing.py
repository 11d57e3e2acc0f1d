from __future__ import annotations

import itertools

import pytest

from lockstep.train import logs
from lockstep.train.logs import StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """A clock whose steps take 1, 2, 10 seconds, with 100 seconds between them that are not its business."""
    times = itertools.chain.from_iterable([(0.0, 1.0), (100.0, 102.0), (200.0, 210.0)])
    monkeypatch.setattr(logs.time, "perf_counter", lambda: next(times))
    return StepClock()


def test_only_steps_are_timed(clock: StepClock):
    for rows in (8, 8, 4):
        clock.start()
        clock.stop(rows=rows)
    assert (clock.steps, clock.examples, clock.summary().seconds, clock.summary().median_step_s) == (3, 20, 13.0, 2.0)
    assert clock.summary().examples_per_s == pytest.approx(20 / 13)


def test_a_pause_is_not_timed(clock: StepClock):
    clock.start()
    clock.pause()
    clock.start()
    clock.stop(rows=1)
    assert clock.summary().seconds == 1.0 + 2.0


def test_the_summary_is_what_was_measured(clock: StepClock):
    clock.start()
    clock.stop(rows=3)
    summary = clock.summary(4)
    assert (summary.epoch, summary.seconds, summary.steps, summary.examples) == (4, 1.0, 1, 3)
    assert summary.median_step_s == 1.0


def test_a_clock_that_has_not_run_is_at_zero():
    assert (StepClock().summary().median_step_s, StepClock().summary().examples_per_s) == (0.0, 0.0)


def test_what_a_device_was_still_at_is_the_last_steps(clock: StepClock):
    clock.start()
    clock.stop(rows=1)
    clock.start()
    clock.extend()
    assert (clock.steps, clock.summary().seconds) == (1, 1.0 + 2.0)
