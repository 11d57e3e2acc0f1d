"""What each suite compares with what."""

from __future__ import annotations

import pytest

from benchmarks.results import Comparison, Figures, figures_of
from benchmarks.suites import cpu, trainer, workers


@pytest.fixture
def rows(make) -> list[Figures]:
    two, four = (make.contender(f"ours-{n}", role="ours", replicas=n) for n in (2, 4))
    ddp_2, ddp_4 = (make.contender(f"ddp-{n}", replicas=n, processes=n) for n in (2, 4))
    slow = make.contender("ddp-4 slow", replicas=4, processes=4)
    return [
        make.figures(two, median_ms=8, peak_mb=90, first_step_s=3.0, share=0.02),
        make.figures(four, median_ms=7, peak_mb=60, first_step_s=4.0, share=0.04),
        make.figures(make.contender("single"), median_ms=14),
        make.figures(ddp_2, median_ms=15, peak_mb=110, first_step_s=2.0),
        make.figures(slow, median_ms=30, peak_mb=10, first_step_s=1.0),
        make.figures(ddp_4, median_ms=20, peak_mb=120, first_step_s=8.0),
        make.figures(make.contender("single channels_last", layout="channels_last"), median_ms=10),
    ]


def test_each_comparison_is_of_like_with_like(rows):
    found = {each.text: (each.limit, each.value, each.verdict) for each in cpu.comparisons_of("mobilenetv2", rows)}

    assert found == {
        "step time, ours-4 / best baseline": (0.75, pytest.approx(0.5), "yes"),
        "step time, ours-4 / best baseline with channels_last": (0.75, 0.7, "yes"),
        "peak resident memory, ours-4 / ddp-4": (0.65, 0.5, "yes"),
        "start to first step, ours-2 / ddp-2": (1.0, 1.5, "NO"),
        "start to first step, ours-4 / ddp-4": (1.0, 0.5, "yes"),
        "exchange and update / step, ours-2": (0.03, pytest.approx(0.02), "yes"),
        "exchange and update / step, ours-4": (0.03, pytest.approx(0.04), "NO"),
    }


def test_a_workload_has_its_own_limits(rows):
    limits = {each.text: each.limit for each in cpu.comparisons_of("mlm", rows)}

    assert limits["step time, ours-4 / best baseline"] == 1.0
    assert not any(text.startswith("exchange") for text in limits)
    assert not any(text.startswith("step") for text in [each.text for each in cpu.comparisons_of("linear", rows)])


def test_what_was_not_measured_is_left_out(rows):
    ours, single = rows[0], rows[2]

    assert [each.text for each in cpu.comparisons_of("mlm", [ours, single])] == ["step time, ours-2 / best baseline"]
    assert cpu.comparisons_of("mlm", [single]) == cpu.comparisons_of("mlm", []) == []


def test_ours_at_two_replicas_is_compared_with_the_best_peer_at_two(make, rows):
    fast = make.contender("fabric-2 channels_last", role="peer", replicas=2, layout="channels_last")
    rows += [
        make.figures(make.contender("fabric-2", role="peer", replicas=2), median_ms=12.5),
        make.figures(fast, median_ms=9),
        make.figures(make.contender("tensorflow-2", role="peer", replicas=2, layout="framework"), median_ms=10),
        make.figures(make.contender("tensorflow-4", role="peer", replicas=4, layout="framework"), median_ms=1),
    ]
    found = {each.text: each.value for each in cpu.comparisons_of("mobilenetv2", rows)}

    assert found["step time, ours-2 / best peer at 2 replicas"] == pytest.approx(0.8)
    assert found["step time, ours-2 / best peer at 2 replicas with channels_last"] == pytest.approx(8 / 9)
    assert found["step time, ours-4 / best baseline"] == pytest.approx(0.5)


@pytest.fixture
def halves(make):
    return [
        make.contender("ours-4", role="ours", replicas=4),
        make.contender("ours-2", role="ours", replicas=2),
        make.contender("alone", role="reference", replicas=2),
        make.contender("together", role="reference", replicas=2, processes=2),
    ]


def test_efficiencies_pair_the_rounds_and_one_has_a_limit(make, halves):
    samples = [
        make.sample("alone", 9, 9, 90),
        make.sample("together", 12, 12),
        make.sample("ours-2", 10, 10),
        make.sample("ours-4", 1),
        make.sample("alone", 18, round_=1),
        make.sample("together", 20, round_=1),
        make.sample("ours-2", 40, round_=1),
    ]
    found = cpu.comparisons_of("linear", figures_of(halves, samples, "mlm"))

    assert [(each.text, each.values, each.limit, each.bound) for each in found] == [
        ("parallel efficiency, alone / ours-2", pytest.approx((0.9, 0.45)), 0.95, "at least"),
        ("step time, alone / together", pytest.approx((0.75, 0.9)), None, "at most"),
        ("step time, together / ours-2", pytest.approx((1.2, 0.5)), None, "at most"),
    ]
    assert found[0].value == pytest.approx(0.675)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_without_one_of_the_three_there_is_no_efficiency(make, halves, missing: int):
    del halves[missing]
    figures = [make.figures(each) for each in halves]

    assert cpu.comparisons_of("linear", figures) == []


def test_the_median_round_is_held_against_the_limit():
    def verdict(limit: float | None, **how: object) -> str:
        return Comparison(text="", values=(0.9, 0.5, 0.3), limit=limit, **how).verdict  # type: ignore[arg-type]

    assert (verdict(0.5), verdict(0.4), verdict(None)) == ("yes", "NO", "")
    assert (verdict(0.5, bound="at least"), verdict(0.51, bound="at least")) == ("yes", "NO")
    assert (verdict(0.5, bound="below"), verdict(0.51, bound="below")) == ("NO", "yes")
    assert Comparison(text="", values=(), limit=1.0).verdict == "not measured"


def test_our_best_trainer_is_compared_with_the_better_of_the_original(make):
    figures = [
        make.figures(make.contender("lockstep-2", role="ours"), median_ms=9.5),
        make.figures(make.contender("lockstep-4", role="ours"), median_ms=8),
        make.figures(make.contender("trainer"), median_ms=15),
        make.figures(make.contender("trainer ddp-2"), median_ms=10),
    ]
    (found,) = trainer.section_of(figures).comparisons

    assert (found.text, found.limit, found.value) == ("step time, lockstep-4 / trainer ddp-2", 0.9, 0.8)
    assert found.verdict == "yes"
    assert trainer.section_of(figures[:2]).comparisons == trainer.section_of(figures[2:]).comparisons == []


def test_workers_are_compared_with_each_setting_that_sends_as_many_bytes(make):
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
    found = workers.comparisons_of(figures_of(contenders, samples, "mlm"), 0.7)

    assert [(each.text, each.limit, each.verdict) for each in found] == [
        ("step time, hosts-2x2 / ddp-2x2", 0.7, "yes"),
        ("step time, hosts-2x2 / ddp-2x2 keeping", 0.7, "NO"),
        ("step time, hosts-2x2 bf16 / ddp-2x2 keeping fp16", None, ""),
    ]
    assert found[0].values == (60 / 100, 61 / 101, 62 / 102)
    assert found[0].value == 61 / 101
