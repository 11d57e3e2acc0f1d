"""Real trials in real processes, of the workload that takes milliseconds."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Rounds, Sample, memory_of, run_rounds, run_trial, trials_of
from benchmarks.suites.cpu import contenders_for
from benchmarks.trial import Trial
from benchmarks.workloads import WORKLOADS
from lockstep.errors import ConfigError, ReplicaError

NAMED = {contender.name: contender for contender in contenders_for("linear")}


def trial(name: str, **changes: int) -> Trial:
    settings = {"warm_up": 1, "steps": 2, "cores": 2} | changes
    return Trial(workload=WORKLOADS["linear"], contender=NAMED[name], **settings)


@pytest.mark.workers
def test_contenders_take_turns_and_do_the_same_work():
    ours, ddp = run_rounds([trial("lockstep-2"), trial("ddp-2")], rounds=1).samples

    assert (ours.contender, ddp.contender) == ("lockstep-2", "ddp-2")
    # The third step's loss follows from two updates, so it agrees only if the gradients and the updates do.
    assert ours.loss == pytest.approx(ddp.loss, rel=1e-4)
    assert len(ours.step_ms) == len(ddp.step_ms) == len(ours.exchange_ms) == 2
    assert all(0 < part < whole for part, whole in zip(ours.exchange_ms, ours.step_ms, strict=True))
    assert ddp.exchange_ms == ()
    assert ddp.memory.peak_mb > 1.5 * ours.memory.peak_mb
    assert min(ours.first_step_s, ddp.first_step_s) > 0.1
    assert min(ours.cpu_ms, ddp.cpu_ms) > 0
    assert ours.trained == ddp.trained == 55298


@pytest.mark.workers
def test_a_reference_trains_each_half_without_the_other():
    sample = run_trial(trial("halves together", steps=1))

    assert sample.loss == pytest.approx((loss_of_half(0) + loss_of_half(1)) / 2, rel=1e-5)
    assert sample.trained == 55298


def loss_of_half(half: int) -> float:
    """The second step's loss of a plain loop over that half of the batches."""
    workload = WORKLOADS["linear"]
    torch.manual_seed(0)
    module = workload.make_module()
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate)
    for x, y in workload.make_batches(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x.chunk(2)[half]), y.chunk(2)[half])
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.workers
def test_a_contender_that_fails_is_named_and_leaves_no_process(capfd: pytest.CaptureFixture[str]):
    broken = replace(trial("ddp-2"), contender=replace(NAMED["ddp-2"], layout="auto"))

    with pytest.raises(
        ReplicaError,
        match="contender 'ddp-2' on workload 'linear' ended before its last step: ConfigError: layout='auto' is",
    ):
        run_trial(broken)
    assert "layout='auto' is for our strategies" in capfd.readouterr().err


class Clock:
    """Trials that take made-up seconds of a made-up clock."""

    def __init__(self, make: Any, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now, self.ran, self._make, self._seconds = 0.0, [], make, seconds
        monkeypatch.setattr(harness, "run_trial", self.run)
        monkeypatch.setattr(harness.time, "monotonic", lambda: self.now)

    def run(self, trial: Trial, index: int) -> Sample:
        name, limit_s = trial.contender.name, trial.contender.limit_s
        self.ran.append((index, name, limit_s))
        self.now += min(self._seconds[name], limit_s)
        if name == "broken" or self._seconds[name] > limit_s:
            raise ReplicaError("it broke")
        return replace(self._make.sample(name, 10.0, round_=index), workload="linear")

    def rounds(self, make: Any, **limits: Any) -> Rounds:
        contenders = [make.contender(name, role="peer" if name == "jax" else "ours") for name in self._seconds]
        conditions = replace(make.conditions(), warm_up=1, steps=1)
        return run_rounds(trials_of(WORKLOADS["linear"], contenders, conditions), **limits)


def test_who_fails_takes_no_further_part_and_the_others_go_on(make: Any, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(make, monkeypatch, {"a": 1.0, "broken": 1.0, "b": 1.0, "jax": 301.0})
    rounds = clock.rounds(make, rounds=2)

    assert [(index, name) for index, name, _ in clock.ran] == [
        *((0, "a"), (0, "broken"), (0, "b"), (0, "jax"), (1, "a"), (1, "b"))
    ]
    assert [sample.contender for sample in rounds.samples] == ["a", "b", "a", "b"]
    # Another framework's environment is not ours to mend, so the command does not fail with it.
    assert [(each.contender, each.reason, each.failed) for each in rounds.absences] == [
        ("broken", "it broke", True),
        ("jax", "it broke", False),
    ]


def test_rounds_go_on_while_a_whole_one_fits(make: Any, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(make, monkeypatch, {"a": 20.0, "b": 15.0, "slow": 500.0, "late": 1.0})
    rounds = clock.rounds(make, rounds=9, until_s=100.0)

    assert clock.ran == [(0, "a", 100.0), (0, "b", 80.0), (0, "slow", 65.0)]
    assert [sample.contender for sample in rounds.samples] == ["a", "b"]
    assert [(each.contender, each.failed) for each in rounds.absences] == [("slow", False), ("late", False)]
    assert rounds.absences[1].reason.startswith("no time was left for it")

    clock = Clock(make, monkeypatch, {"a": 20.0, "b": 15.0})
    clock.rounds(make, rounds=9, until_s=110.0)
    assert [index for index, *_ in clock.ran] == [0, 0, 1, 1]  # 40 s are left: a round, but not its margin


@pytest.mark.parametrize("name", ["warm_up", "steps", "cores"])
def test_a_trial_of_nothing_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}=0 was given, expected at least 1"):
        trial("single", **{name: 0})


def test_no_rounds_are_refused():
    with pytest.raises(ConfigError, match="rounds=0 was given, expected at least 1"):
        run_rounds([trial("single")], rounds=0)


@pytest.mark.parametrize(("name", "threads"), [("single", 2), ("ddp-2", 1), ("ddp-4", 1)])
def test_the_cores_are_divided_among_the_processes(name: str, threads: int):
    assert trial(name).threads_per_process == threads


def test_our_own_memory_is_in_order():
    memory = memory_of([os.getpid()])

    assert 10 < memory.pss_mb <= memory.peak_mb * 1.01


def test_the_memory_of_several_processes_is_added_up():
    once, twice = memory_of([os.getpid()]), memory_of([os.getpid()] * 2)

    assert twice.pss_mb == pytest.approx(2 * once.pss_mb, rel=0.05)
    assert twice.peak_mb == pytest.approx(2 * once.peak_mb, rel=0.05)
