from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.suites.workers import Comparison, comparisons_of, rows_of


def test_the_part_of_the_link_is_what_the_slowed_link_adds_round_by_round(make):
    ours = make.contender("hosts-2x2", role="ours", shares=4, processes=2)
    samples = [
        replace(make.sample("hosts-2x2", 100.0, 120.0, 140.0), sent_mb=17.0),
        replace(make.sample("hosts-2x2", 200.0, round_=1), sent_mb=19.0),
        make.sample("hosts-2x2 free", 90.0),
        make.sample("hosts-2x2 free", 150.0, round_=1),
    ]
    (row,) = rows_of([ours], samples, "mlm")

    assert row.figures.median_ms == 130.0
    assert row.free_ms == 120.0
    assert row.link_ms == 40.0  # 120 - 90 and 200 - 150
    assert row.sent_mb == 18.0


def test_without_a_free_link_nothing_is_said_about_it(make):
    (row,) = rows_of([make.contender("workers-2", role="ours")], [make.sample("workers-2", 100.0)], "mlm")

    assert (row.free_ms, row.link_ms) == (None, None)


def test_ours_is_compared_with_each_setting_that_sends_as_many_bytes(make):
    contenders = [
        make.contender("hosts-2x2", role="ours"),
        make.contender("hosts-2x2 bf16", role="ours"),
        make.contender("ddp-2x2"),
        make.contender("ddp-2x2 keeping"),
        make.contender("ddp-2x2 keeping fp16"),
    ]
    steps = {"hosts-2x2": 60.0, "hosts-2x2 bf16": 50.0, "ddp-2x2": 100.0, "ddp-2x2 keeping": 80.0}
    samples = [
        make.sample(name, step + index, round_=index)
        for name, step in {**steps, "ddp-2x2 keeping fp16": 100.0}.items()
        for index in range(3)
    ]
    found = comparisons_of(contenders, samples, "mlm", limit=0.7)

    assert [(one.text, one.limit, one.reached) for one in found] == [
        ("hosts-2x2 / ddp-2x2", 0.7, True),
        ("hosts-2x2 / ddp-2x2 keeping", 0.7, False),
        ("hosts-2x2 bf16 / ddp-2x2 keeping fp16", None, True),
    ]
    assert found[0].rounds == (60 / 100, 61 / 101, 62 / 102)
    assert found[0].value == 61 / 101


@pytest.mark.parametrize(("limit", "reached"), [(0.5, True), (0.4, False), (None, True)])
def test_the_median_is_held_against_the_limit(limit: float | None, reached: bool):
    assert Comparison(text="a / b", rounds=(0.9, 0.5, 0.3), limit=limit).reached is reached
