from __future__ import annotations

import pytest

from benchmarks.results import efficiencies_of


@pytest.fixture
def contenders(make):
    return [
        make.contender("ours-4", role="ours", shares=4),
        make.contender("ours-2", role="ours", shares=2),
        make.contender("alone", role="yardstick", shares=2),
        make.contender("together", role="yardstick", shares=2, processes=2),
    ]


def test_quotients_pair_the_rounds(make, contenders):
    samples = [
        make.sample("alone", 9, 9, 90),
        make.sample("together", 12, 12),
        make.sample("ours-2", 10, 10),
        make.sample("ours-4", 1),
        make.sample("alone", 18, round_=1),
        make.sample("together", 20, round_=1),
        make.sample("ours-2", 40, round_=1),
    ]

    found = {one.text: (one.rounds, one.promised) for one in efficiencies_of(contenders, samples, "mlm")}

    assert found == {
        "alone / ours-2": (pytest.approx((0.9, 0.45)), True),
        "alone / together": (pytest.approx((0.75, 0.9)), False),
        "together / ours-2": (pytest.approx((1.2, 0.5)), False),
    }


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_without_one_of_the_three_nothing_is_said(make, contenders, missing: int):
    del contenders[missing]

    assert efficiencies_of(contenders, [], "mlm") == []


def test_the_median_round_is_the_value(make, contenders):
    rounds = [(10, 10), (10, 20), (10, 12.5)]
    samples = [
        make.sample(name, ms, round_=index)
        for index, (alone, ours) in enumerate(rounds)
        for name, ms in (("alone", alone), ("together", alone), ("ours-2", ours))
    ]

    assert efficiencies_of(contenders, samples, "mlm")[0].value == pytest.approx(0.8)
