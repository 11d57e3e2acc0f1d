"""Real trials in real processes, of the workload that takes milliseconds."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from benchmarks.harness import memory_of, plan_rounds, read_sizes, run_rounds, run_trial
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
    seen: list[tuple[str, int, int]] = []
    ours, ddp = run_rounds(
        [trial("lockstep-2"), trial("ddp-2")],
        rounds=1,
        progress=lambda sample, done, planned: seen.append((sample.contender, done, planned)),
    ).samples

    assert seen == [("lockstep-2", 1, 2), ("ddp-2", 2, 2)]
    # The third step's loss follows from two updates, so it agrees only if the gradients and the updates do.
    assert ours.loss == pytest.approx(ddp.loss, rel=1e-4)
    assert len(ours.step_ms) == len(ddp.step_ms) == len(ours.exchange_ms) == 2
    assert all(0 < part < whole for part, whole in zip(ours.exchange_ms, ours.step_ms, strict=True))
    assert ddp.exchange_ms == ()
    assert ddp.memory.rss_mb > 1.5 * ours.memory.rss_mb
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


def test_the_plan_is_in_turn_and_has_the_checks_once():
    trials = [trial("lockstep-2"), trial("single"), trial("lockstep-2 fit")]
    plan = [(index, planned.contender.name) for index, planned in plan_rounds(trials, 2)]

    assert plan == [(0, "lockstep-2"), (0, "single"), (0, "lockstep-2 fit"), (1, "lockstep-2"), (1, "single")]


@pytest.mark.parametrize("name", ["warm_up", "steps", "cores"])
def test_a_trial_of_nothing_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}=0 was given, expected at least 1"):
        trial("single", **{name: 0})


def test_no_rounds_are_refused():
    with pytest.raises(ConfigError, match="rounds=0 was given, expected at least 1"):
        run_rounds([trial("single")], rounds=0, progress=lambda *_: None)


@pytest.mark.parametrize(("name", "threads"), [("single", 2), ("ddp-2", 1), ("ddp-4", 1)])
def test_the_cores_are_divided_among_the_processes(name: str, threads: int):
    assert trial(name).threads_per_process == threads


def test_sizes_are_read_in_megabytes():
    lines = [
        "5575b357b000-7ffc48a53000 ---p 00000000 00:00 0   [rollup]",
        "Rss:     2048 kB",
        "Threads:\t3",
        "Pss:  512 kB",
    ]

    assert read_sizes(lines) == {"Rss": 2.0, "Pss": 0.5}


def test_our_own_memory_is_in_order():
    memory = memory_of([os.getpid()])

    assert 10 < memory.pss_mb <= memory.rss_mb <= memory.peak_mb * 1.01


def test_the_memory_of_several_processes_is_added_up():
    once, twice = memory_of([os.getpid()]), memory_of([os.getpid()] * 2)

    assert twice.rss_mb == pytest.approx(2 * once.rss_mb, rel=0.05)
    assert twice.peak_mb == pytest.approx(2 * once.peak_mb, rel=0.05)
