from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.replicas.issue_policy import SHORT_STEP_S, TIMED_RUNS, WARM_UP_RUNS, IssuePolicy

RUNS = WARM_UP_RUNS + TIMED_RUNS


def step() -> None:
    pass


def other_step() -> None:
    pass


def feed(policy: IssuePolicy, fn: Callable[[], None], seconds: dict[int, float], runs: int = 3 * RUNS) -> list[int]:
    """Runs that take ``seconds`` at each width; returns the widths that were used."""
    widths = []
    for _ in range(runs):
        widths.append(policy.width(fn))
        policy.record(fn, seconds[widths[-1]])
    return widths


@pytest.mark.parametrize(("narrow", "settled"), [(0.5e-3, 1), (2e-3, 4)])
def test_a_short_step_is_tried_at_both_widths_and_the_faster_one_stays(narrow: float, settled: int):
    widths = feed(IssuePolicy(4), step, {4: 1e-3, 1: narrow})
    assert widths == [4] * RUNS + [1] * RUNS + [settled] * RUNS


def test_a_long_step_is_never_tried_one_after_another():
    assert set(feed(IssuePolicy(4), step, {4: SHORT_STEP_S * 1.01, 1: 0.0})) == {4}


def test_warm_up_runs_do_not_count():
    policy = IssuePolicy(2)
    for _ in range(WARM_UP_RUNS):
        policy.record(step, 100.0)
    assert feed(policy, step, {2: 1e-3, 1: 0.5e-3}, runs=TIMED_RUNS + RUNS + 1)[-1] == 1


def test_each_step_function_is_measured_by_itself():
    policy = IssuePolicy(2)
    feed(policy, step, {2: 1e-3, 1: 0.5e-3})
    assert (policy.width(step), policy.width(other_step)) == (1, 2)


def test_a_lambda_made_anew_at_every_call_is_the_same_step():
    policy = IssuePolicy(2)
    for _ in range(2 * RUNS):
        fresh = lambda: None  # noqa: E731
        policy.record(fresh, {2: 1e-3, 1: 0.5e-3}[policy.width(fresh)])
    assert policy.width(lambda: None) == 2
    assert policy.width(fresh) == 1


def test_nothing_is_tried_where_one_is_the_widest():
    assert set(feed(IssuePolicy(1), step, {1: 1e-3})) == {1}


def test_a_settled_step_keeps_no_more_measurements():
    policy = IssuePolicy(2)
    feed(policy, step, {2: 1e-3, 1: 0.5e-3}, runs=2 * RUNS)
    kept = sum(map(len, policy._trial(step)._seconds.values()))
    feed(policy, step, {2: 1e-3, 1: 0.5e-3})
    assert sum(map(len, policy._trial(step)._seconds.values())) == kept
