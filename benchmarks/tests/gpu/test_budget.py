"""What the ten minutes are spent on, and what goes without."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import suite as rounds_module
from benchmarks.gpu.contenders import Entrant, entrants
from benchmarks.gpu.loops import Pace
from benchmarks.gpu.suite import TOTAL_S, TRIAL_LIMIT_S, WRITING_S, Budget, Planned, in_turn, per_step, run_budgeted
from benchmarks.gpu.workloads import TINY, gpu_workloads
from benchmarks.harness import Sample
from benchmarks.trial import Trial
from lockstep.errors import ConfigError, ReplicaError

PACE = Pace(warm_up=3, lap_steps=5, laps=2)
WORK = gpu_workloads(TINY)


def test_the_seconds_are_ten_minutes_and_a_trial_gets_what_is_left():
    budget = Budget()

    assert budget.total_s == TOTAL_S == 600
    assert budget.trial_limit_s(0) == TRIAL_LIMIT_S
    assert budget.trial_limit_s(500) == 600 - WRITING_S - 500
    assert budget.left_s(700) == 0
    assert budget.admits(80, 500)
    assert not budget.admits(90, 500)
    assert budget.admits_round([10.0, 20.0], 500)
    assert not budget.admits_round([40.0, 40.0], 500)  # 80 would fit, their quarter more would not
    assert "of the 600 s for everything 85 were left, and it is expected to take 90" in budget.refusal(90, 500)
    assert "expected to take 321" in budget.text(32, 321)


@pytest.mark.parametrize("seconds", [0, 59, float("nan")])
def test_a_budget_for_nothing_is_refused(seconds: float):
    with pytest.raises(ConfigError, match="expected at least 60"):
        Budget(total_s=seconds)


def test_what_is_thought_to_take_longest_fits_beside_tests_and_floors():
    """A round fits beside a minute of tests and half a minute of floors."""
    planned = [one for workload in WORK.values() for one in entrants(workload, "cuda", PACE)]

    assert Budget().admits(sum(one.expected_s for one in planned), spent_s=90)
    assert sum(one.contender.role == "peer" for one in planned) == 3 * len(WORK)


def test_a_pace_stops_the_watch_at_the_ends_of_laps():
    assert PACE.steps == 13
    assert [step for step in range(1, 14) if PACE.ends_lap(step)] == [3, 8, 13]


def test_peers_come_after_everybody_s_own_loops(make: Any):
    entered = [(WORK[name], entrants(WORK[name], "cpu", PACE)) for name in ("mlm-bf16", "mobilenetv2-fp32")]
    roles = [(one.workload.name, one.entrant.contender.role) for one in in_turn(entered)]

    assert roles.index(("mobilenetv2-fp32", "baseline")) < roles.index(("mlm-bf16", "peer"))
    assert [role for _, role in roles].count("peer") == 6
    assert [role for _, role in roles][-6:] == ["peer"] * 6


class Machine:
    """Trials that take made-up seconds of a made-up clock."""

    def __init__(self, make: Any, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now, self.ran, self.limits, self._make, self._seconds = 0.0, [], [], make, seconds
        monkeypatch.setattr(rounds_module.time, "monotonic", lambda: self.now)

    def run(self, trial: Trial, index: int) -> Sample:
        name = trial.contender.name
        self.ran.append((index, name))
        self.limits.append(trial.limit_s)
        self.now += self._seconds[name]
        if name == "broken":
            raise ReplicaError("it broke")
        return self._make.sample(name, 10.0, round_=index)

    def planned(self, name: str, expected_s: float, absent: str = "") -> Planned:
        entrant = Entrant(contender=self._make.contender(name), expected_s=expected_s, absent=absent)
        return Planned(workload=WORK["mlm-bf16"], entrant=entrant)


def test_rounds_go_on_while_a_whole_one_fits(make: Any, monkeypatch: pytest.MonkeyPatch):
    machine = Machine(make, monkeypatch, {"a": 20.0, "b": 15.0, "broken": 1.0, "late": 50.0})
    planned = [
        machine.planned("a", 20),
        machine.planned("broken", 5),
        machine.planned("b", 15),
        machine.planned("gone", 5, absent="gone is not installed"),
        machine.planned("late", 100),
    ]
    seen: list[tuple[str, int, int]] = []
    done = run_budgeted(
        planned,
        pace=PACE,
        cores=2,
        rounds=9,
        budget=Budget(total_s=150),
        started_s=0.0,
        progress=lambda outcome, number, of: seen.append((outcome.contender, number, of)),
        run=machine.run,
    )

    # 36 s for the first round; 99 are left, and "late" wants 100. Rounds of 35 s follow while a quarter more would fit.
    assert machine.ran == [(0, "a"), (0, "broken"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert machine.limits == [135, 115, 114, 99, 79, 64, 44]
    reasons = {absence.contender: absence.reason for absence in done.absences}
    assert reasons == {
        "gone": "gone is not installed",
        "broken": "it broke",
        "late": Budget(total_s=150).refusal(100, 36),
    }
    assert seen == [("a", 1, 4), ("broken", 2, 4), ("b", 3, 4), ("late", 4, 4), *[("a", 1, 2), ("b", 2, 2)] * 2]


def test_a_sample_s_times_become_those_of_a_step(make: Any):
    sample = per_step(make.sample("a", 50.0, 60.0), PACE)

    assert (sample.step_ms, sample.cpu_ms) == ((10.0, 12.0), 20.0)


def test_every_contender_travels_to_its_process():
    import pickle

    for workload in WORK.values():
        for one in entrants(workload, "cuda", PACE):
            assert pickle.loads(pickle.dumps(one.contender)).name == one.contender.name
