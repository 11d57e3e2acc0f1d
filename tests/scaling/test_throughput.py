from __future__ import annotations

import pytest

from lockstep.errors import DataError
from lockstep_tools.scaling.runner import Sample, rows_of


def sample(make, configuration, record, index: int = 0) -> Sample:
    return Sample(configuration=configuration, round=index, record=record)


def test_an_epoch_is_extrapolated_and_examples_are_counted_over_all_that_was_timed(make):
    one = make.plan(2)[0]
    (row,) = rows_of([one], [sample(make, one, make.record(200.0, 300.0, batch=64, steps_an_epoch=10))])
    assert (row.epoch_s, row.examples_per_s) == (pytest.approx(2.5), pytest.approx(256))


def test_strong_scaling_compares_steps_and_weak_scaling_examples(make):
    one, _, same, times = make.plan(2, cores=4, devices=2)
    row = {
        row.configuration.layout: row
        for row in rows_of(
            (one, same, times),
            [
                sample(make, one, make.record(100.0)),
                sample(make, same, make.record(62.5)),
                sample(make, times, make.record(125.0, batch=128)),
            ],
        )
    }

    assert (row["one device"].speed_up, row["one device"].efficiency) == (1.0, 1.0)
    assert row["same total"].speed_up == pytest.approx(100 / 62.5)
    assert row["same total"].efficiency == pytest.approx(0.8)
    assert row["N times the total"].speed_up == pytest.approx(1.6)
    assert row["N times the total"].efficiency == pytest.approx(0.8)


def test_four_replicas_on_two_cores_are_efficient_when_they_are_twice_as_fast(make):
    one, _, same, _ = make.plan(4, cores=2)
    rows = rows_of((one, same), [sample(make, one, make.record(100.0)), sample(make, same, make.record(50.0))])
    assert rows[1].efficiency == pytest.approx(1.0)


def test_a_machine_that_slows_down_between_rounds_is_fair_to_all(make):
    one, _, same, _ = make.plan(2, cores=2, devices=2)
    samples = [
        sample(make, configuration, make.record(ms * slow), index)
        for index, slow in enumerate((1, 2, 4))
        for configuration, ms in ((one, 100.0), (same, 55.0))
    ]
    assert rows_of((one, same), samples)[1].speed_up == pytest.approx(100 / 55)


def test_the_spread_is_over_all_steps_and_the_loss_a_median(make):
    one = make.plan(2)[0]
    samples = [
        sample(make, one, make.record(*steps, loss=loss), index)
        for index, (steps, loss) in enumerate([((10.0, 20.0), 1.0), ((30.0, 40.0), 3.0), ((50.0,), 2.0)])
    ]
    (row,) = rows_of([one], samples)
    assert (row.median_ms, row.p10_ms, row.p90_ms, row.loss) == (30.0, 14.0, 46.0, 2.0)
    assert row.parts.step == 30.0


def test_what_was_not_measured_is_not_compared(make):
    one, same = (row for row in make.plan(2) if row.layout in ("one device", "same total"))
    with pytest.raises(DataError, match="'2 replicas, same total' has no sample"):
        rows_of([one, same], [sample(make, one, make.record(1.0))])
