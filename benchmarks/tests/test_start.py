"""The suite ``start``: what is compared, and its programs, each in processes of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness import run_trial
from benchmarks.results import Figures
from benchmarks.suites.start import MAX_START_RATIO, comparisons_of, contenders
from benchmarks.trial import Trial
from benchmarks.workloads import WORKLOADS


def test_starts_are_compared_round_by_round(make):
    figures = []
    for name, start_s in (("lockstep-2", 3.0), ("ddp-2", 5.0), ("single", 2.0)):
        who = make.contender(name)
        samples = [
            replace(make.sample(name, 10.0, round_=index), first_step_s=start_s * (1 + index), first_step_cpu_s=start_s)
            for index in range(2)
        ]
        figures.append(Figures(contender=who, samples=tuple(samples)))

    found = {each.text: each for each in comparisons_of(figures)}

    ours = found["start to first step, lockstep-2 / ddp-2"]
    assert (ours.values, ours.limit, ours.verdict) == ((0.6, 0.6), MAX_START_RATIO, "yes")
    assert found["CPU time of the start, lockstep-2 / ddp-2"].value == 0.6
    assert found["start to first step, lockstep-2 / single"].values == (1.5, 1.5)
    assert comparisons_of(figures[1:]) == []


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", ["lockstep-2", "ddp-2", "single"])
def test_the_programs_train_the_same_steps_as_one_process(name: str):
    (contender,) = (each for each in contenders("linear") if each.name == name)
    sample = run_trial(Trial(workload=WORKLOADS["linear"], contender=contender, warm_up=1, steps=1, cores=2))

    assert sample.loss == pytest.approx(_second_loss(), rel=1e-3)
    assert sample.first_step_cpu_s > (3 if name == "ddp-2" else 1)  # torch is imported in torchrun too


def _second_loss() -> float:
    """The loss of the second step on ``linear``, by hand."""
    work = WORKLOADS["linear"]
    torch.manual_seed(0)
    module, losses = work.make_module(), []
    optimizer = torch.optim.Adam(module.parameters(), lr=work.learning_rate)
    for x, y in work.make_batches(2):
        optimizer.zero_grad()
        losses.append(work.loss(module(x), y)[0] / work.count)
        losses[-1].backward()
        optimizer.step()
    return float(losses[-1].detach())
