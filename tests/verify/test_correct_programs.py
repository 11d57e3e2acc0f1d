"""Programs that are right pass: a loop of their own with arguments, a scheduler and accumulation, and Model.fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep_tools.verify.report import VerifyReport

Verified = Callable[..., VerifyReport]


def test_a_loop_with_an_uneven_last_batch_a_scheduler_and_arguments_is_equal(verified: Verified):
    report = verified("sound_loop", "--hidden", "5", devices="cpu:4", steps=4)

    assert report.equal, report.first
    assert report.findings == ()
    assert report.comparison.start.devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert report.comparison.reference.devices == ("cpu:0",)
    assert len(report.comparison.steps) == 4
    assert [len(step.batch.rows) for step in report.comparison.steps] == [8, 8, 3, 8]
    assert report.comparison.start.parameters["0.weight"].shape == (5, 6)
    assert list(dict(report.experiments)) == ["all replicas with one, as written"]


def test_everything_is_compared_by_name_and_in_the_order_of_a_step(verified: Verified):
    report = verified("sound_loop", "--hidden", "5", devices="cpu:4", steps=4)
    second = [(each.kind, each.name) for each in report.comparison.differences if each.step == 2]
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]

    assert second == [
        ("rows", "args[0][0]"),
        ("output", "Sequential"),
        ("loss", "total"),
        *(("gradient", name) for name in names),
        *(("weight", name) for name in names),
    ]
    assert max(each.amount for each in report.comparison.differences) > 0  # another order of additions
    assert all(each.size > 0 for each in report.comparison.differences)


def test_accumulated_gradients_and_an_early_end_are_equal(verified: Verified):
    report = verified("sound_loop", "--every", "2", devices="cpu:3")
    assert report.equal, report.first
    assert len(report.comparison.steps) == 2  # there are no more, of 3 that were asked for
    rows = [each.batch.rows for each in report.comparison.steps]
    assert [len(each) for each in rows] == [8, 3]  # the first batch of those that were accumulated


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_clipped_gradients_are_equal(verified: Verified, where: str):
    report = verified("sound_loop", "--clip", where, devices="cpu:3")
    assert report.equal, report.first


def test_a_model_on_devices_of_the_program_s_own_is_equal(verified: Verified):
    report = verified("sound_fit", devices=None)
    assert report.equal, report.first
    assert report.comparison.start.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert len(report.comparison.steps) == 3


def test_half_precision_and_the_workers_of_a_data_loader_are_judged_by_its_rounding(verified: Verified):
    report = verified("sound_fit", "bf16", "2", devices=None)
    assert report.equal, report.first
    assert report.tolerance.relative == 4 * 2.0**-7
    assert report.comparison.ends[0].unit == 2.0**-23


def test_the_same_split_from_outside_is_accepted(verified: Verified):
    assert verified("sound_fit", devices="cpu:3").equal


def test_the_first_strategy_of_several_devices_is_compared_and_nothing_swallows_the_end(verified: Verified):
    report = verified("two_strategies")
    assert report.equal, report.first
    assert [(end.strategies, end.single) for end in report.comparison.ends] == [(2, 1), (2, 1)]
