"""Each cause by a program that has just that fault: it is found, tested, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep_tools.verify.report import VerifyReport

Verified = Callable[..., VerifyReport]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "first", "cause", "tested"),
    [
        ("batch_norm", ("output", 1), "batch statistics", "sync_batchnorm=True): the difference vanishes"),
        ("dropout", ("output", 1), "random numbers", "ran both with dropout off: the difference vanishes"),
        ("noise", ("output", 1), "random numbers", "all draws replaced by constants: the difference vanishes"),
        ("mean_over_shard", ("loss", 1), "mean over a shard", "weighted with the shards' shares 0.5"),
        ("all_reduced_loss", ("loss", 1), "all-reduced loss", "weighted with the shards' shares 0.5"),
        ("all_reduced_mean", ("loss", 1), "all-reduced loss", "weighted with the shards' shares 0.5"),
        ("undistributed", ("rows", 1), "undistributed batch", "are 2 times the one replica's"),
        ("batch_size", ("rows", 1), "batch size", "2 times as many"),
        ("order", ("rows", 1), "different rows", "two runs on one replica get the same rows"),
        ("unseeded", ("rows", 1), "not reproducible", "ran it twice on one replica"),
        (
            "centred_loss",
            ("loss", 1),
            "loss not per example",
            "no factors for the 2 replicas' gradients give the one replica's",
        ),
        ("weight_penalty", ("loss", 1), "weight penalty", "the sum less 0.1 times the weights"),
        (
            "decay_by_hand",
            ("weight changed after update", 1),
            "changed outside the optimizer",
            "in both runs: the difference",
        ),
        ("learning_rate", ("weight", 1), "learning rate", "fitted one factor"),
        ("centred_module", ("output", 1), "rows mixed in the module", "its outputs are those of the replicas"),
    ],
)
def test_the_cause_is_found_and_tested(
    program: str, first: tuple[str, int], cause: str, tested: str, verified: Verified
):
    report = verified(program)
    assert report.first is not None
    assert (report.first.kind, report.first.step) == first
    assert [finding.cause for finding in report.findings] == [cause]
    assert tested in report.findings[0].tested


@pytest.mark.parametrize(
    ("program", "sound"),
    [
        ("dropout", True),
        ("sound_loop", True),
        ("dropout_and_mean", False),
        ("noise", False),
        ("harmless_dropout", False),
    ],
)
def test_dropout_alone_is_nothing_wrong(program: str, sound: bool, verified: Verified):
    assert verified(program).sound is sound


@pytest.mark.slow
def test_two_causes_are_both_found(verified: Verified):
    report = verified("dropout_and_mean")
    assert [finding.cause for finding in report.findings] == ["random numbers", "mean over a shard"]
    assert "the first that differs is then the loss" in report.findings[0].tested


@pytest.mark.slow
def test_the_experiments_are_listed_with_what_came_of_them(verified: Verified):
    experiments = verified("decay_by_hand").experiments
    assert [(what, outcome.split(":")[0]) for what, outcome in experiments] == [
        ("all replicas with one, as written", "step 1"),
        ("all replicas with one, weights held between updates", "equal"),
    ]


@pytest.mark.slow
def test_a_small_difference_is_judged_by_measured_rounding(verified: Verified):
    report = verified("learning_rate")
    assert report.tolerance.noise
    assert "one replica with itself, weights moved by one rounding error" in dict(report.experiments)


@pytest.mark.slow
def test_what_the_difference_does_not_need_is_no_cause(verified: Verified):
    report = verified("harmless_dropout")
    assert "all replicas with one, without dropout" in dict(report.experiments)
    assert [finding.cause for finding in report.findings] == ["weight penalty"]
