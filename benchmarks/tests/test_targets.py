from __future__ import annotations

import pytest

from benchmarks.results import Efficiency, Target, targets_of


@pytest.fixture
def rows(make):
    two, four = (make.contender(f"ours-{n}", role="ours", shares=n) for n in (2, 4))
    return [
        make.figures(two, ratio=0.8, peak_mb=90, first_step_s=3.0, share=0.02),
        make.figures(four, ratio=0.7, peak_mb=60, first_step_s=4.0, share=0.04),
        make.figures(make.contender("single"), ratio=1.4),
        make.figures(make.contender("ddp-2", shares=2, processes=2), ratio=1.5, peak_mb=110, first_step_s=2.0),
        make.figures(
            make.contender("ddp-4 slow", shares=4, processes=4), ratio=3, median_ms=30, peak_mb=10, first_step_s=1.0
        ),
        make.figures(
            make.contender("ddp-4", shares=4, processes=4), ratio=2, median_ms=20, peak_mb=120, first_step_s=8.0
        ),
        make.figures(make.contender("check", role="check", shares=4), ratio=0.1),
        make.figures(make.contender("single channels_last", layout="channels_last"), ratio=1.0),
        make.figures(make.contender("ddp check", shares=2, processes=2, role="check"), median_ms=1, first_step_s=9.0),
    ]


def test_each_target_compares_like_with_like(rows):
    targets = {target.text: (target.limit, target.value, target.reached) for target in targets_of("mobilenetv2", rows)}

    assert targets == {
        "step time, ours-4 / best rival": (0.75, pytest.approx(0.5), True),
        "step time, ours-4 / best rival told to use channels_last": (0.75, 0.7, True),
        "peak resident memory, ours-4 / ddp-4": (0.65, 0.5, True),
        "start to first step, ours-2 / ddp-2": (1.0, 1.5, False),
        "start to first step, ours-4 / ddp-4": (1.0, 0.5, True),
        "exchange and update / step, ours-2": (0.03, 0.02, True),
        "exchange and update / step, ours-4": (0.03, 0.04, False),
    }


def test_a_workload_has_its_own_limits(rows):
    texts = {target.text: target.limit for target in targets_of("mlm", rows)}

    assert texts["step time, ours-4 / best rival"] == 1.0
    assert not any(text.startswith("exchange") for text in texts)


def test_what_was_not_measured_is_left_out(rows):
    ours, single = rows[0], rows[2]

    assert [target.text for target in targets_of("mlm", [ours, single])] == ["step time, ours-2 / best rival"]
    assert targets_of("mlm", [single]) == []


def test_ours_at_two_replicas_is_held_against_the_best_peer_at_two(make, rows):
    rows += [
        make.figures(make.contender("fabric-2", role="peer", shares=2), ratio=1.25),
        make.figures(
            make.contender("fabric-2 channels_last", role="peer", shares=2, layout="channels_last"), ratio=0.9
        ),
        make.figures(make.contender("tensorflow-2", role="peer", shares=2, layout="framework"), ratio=1.0),
        make.figures(make.contender("tensorflow-4", role="peer", shares=4, layout="framework"), ratio=0.1),
    ]
    targets = {target.text: target.value for target in targets_of("mobilenetv2", rows)}

    assert targets["step time, ours-2 / best peer at 2 replicas"] == pytest.approx(0.8)
    assert targets["step time, ours-2 / best peer at 2 replicas told to use channels_last"] == pytest.approx(0.8 / 0.9)
    assert targets["step time, ours-4 / best rival"] == pytest.approx(0.5)


def test_only_the_promised_efficiency_is_a_target(make, rows):
    alone = Efficiency(text="alone / ours", rounds=(0.96, 0.94, 0.95), promised=True)
    targets = [
        one for one in targets_of("mlm", rows, [alone, Efficiency(text="b", rounds=(0.1,))]) if "eff" in one.text
    ]

    assert [(one.text, one.value, one.reached) for one in targets] == [
        ("parallel efficiency, alone / ours", 0.95, True)
    ]


def test_a_value_at_the_limit_is_reached():
    assert Target(text="", limit=0.65, value=0.65).reached
    assert not Target(text="", limit=0.65, value=0.6501).reached
    assert Target(text="", limit=0.95, value=0.95, bound="at least").reached
    assert not Target(text="", limit=0.95, value=0.9499, bound="at least").reached
