from __future__ import annotations

import pytest

from benchmarks.results import figures_of, paired_ratios


def test_a_ratio_pairs_the_rounds_so_that_a_slow_round_weighs_on_both(make):
    # Each round is slower than the one before, for both: the ratios of the pairs are 0.25, 0.5 and 0.625.
    ours = [make.sample("a", 1, 1, 3), make.sample("a", 2, 2, 2, round_=1), make.sample("a", 5, 5, 5, round_=2)]
    theirs = [make.sample("b", 4, 4, 4), make.sample("b", 4, 4, 9, round_=1), make.sample("b", 8, 8, 8, round_=2)]

    assert paired_ratios(ours, theirs) == (0.25, 0.5, 0.625)


def test_a_ratio_uses_the_rounds_that_both_have(make):
    ours = [make.sample("a", 3)]
    theirs = [make.sample("b", 4), make.sample("b", 400, round_=1)]

    assert paired_ratios(ours, theirs) == (0.75,)


def test_ratios_are_to_the_fastest_baseline_and_not_to_ours(make):
    contenders = [make.contender("ours", role="ours"), make.contender("slow"), make.contender("fast")]
    samples = [make.sample("ours", 1), make.sample("slow", 4), make.sample("fast", 2)]

    assert [row.ratio for row in figures_of(contenders, samples, "mlm")] == [0.5, 2.0, 1.0]


def test_figures_pool_the_steps_and_take_the_median_of_what_a_round_has_once(make):
    ours, baseline = make.contender("ours", role="ours"), make.contender("baseline")
    samples = [
        make.sample("ours", 10, 20, 30, exchange_ms=(1, 2, 3)),
        make.sample("baseline", 40, 40, 40),
        make.sample("ours", 40, 50, 60, round_=1, exchange_ms=(5, 10, 15)),
        make.sample("baseline", 100, 100, 100, round_=1),
    ]

    first, second = figures_of([ours, baseline], samples, "mlm")

    assert (first.median_ms, first.percentile_ms(10), first.percentile_ms(90)) == (35.0, 15.0, 55.0)
    assert first.ratio == 0.5
    assert first.exchange_share == pytest.approx((0.1 + 0.2) / 2)
    assert (first.first_step_s, first.over_rounds(lambda sample: sample.cpu_ms)) == (3.5, 50.0)
    assert (first.memory.peak_mb, first.memory.pss_mb) == (100.5, 98.5)
    assert (second.ratio, second.exchange_share) == (1.0, None)


def test_without_a_baseline_the_first_contender_is_the_reference(make):
    contenders = [make.contender("a", role="ours"), make.contender("b", role="ours")]
    samples = [make.sample("a", 10), make.sample("b", 15)]

    assert [row.ratio for row in figures_of(contenders, samples, "mlm")] == [1.0, 1.5]


def test_a_contender_without_samples_has_no_figures(make):
    contenders = [make.contender("a"), make.contender("b")]

    assert [row.contender.name for row in figures_of(contenders, [make.sample("b", 1)], "mlm")] == ["b"]
    assert figures_of(contenders, [make.sample("b", 1)], "mobilenetv2") == []
