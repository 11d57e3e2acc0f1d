"""The program of examples/clients gives fastai's own numbers on one device, with fastai's own optimizer."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastai")

from fastai.basics import SGD, Learner
from fastai.callback.training import GradientAccumulation

import lockstep as ls

PROGRAM = Path(__file__).parents[2] / "examples" / "clients" / "fastai_learner.py"


def trained(learn: Any) -> tuple[Any, list[float], list[float]]:
    with learn.no_mbar(), learn.no_logging():
        learn.fit_one_cycle(2, 0.01)
    return learn, [float(loss) for loss in learn.recorder.losses], list(learn.validate())


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_divided_learner_equals_fastai_s(replicas: int) -> None:
    torch.set_num_threads(1)
    program = runpy.run_path(str(PROGRAM))
    expected, losses, scores = trained(program["learner"](Learner))
    learn = program["learner"](program["ReplicaLearner"])
    learn.strategy = ls.MirroredStrategy(replicas=replicas)
    same, others, values = trained(learn)
    for weight, other in zip(expected.model.parameters(), same.model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-5, atol=1e-5)  # Adam divides by small numbers
    assert len(losses) == 48  # of 64 rows each, but for 28 in the last of an epoch
    assert others == pytest.approx(losses, abs=1e-5)
    assert values == pytest.approx(scores, abs=1e-5)


def test_callbacks_may_change_the_loss() -> None:
    program = runpy.run_path(str(PROGRAM))
    expected, losses, _ = trained(program["learner"](Learner, [GradientAccumulation(128)], opt_func=SGD))
    learn = program["learner"](program["ReplicaLearner"], [GradientAccumulation(128)], opt_func=SGD)
    learn.strategy = ls.MirroredStrategy(replicas=2)
    same, others, _ = trained(learn)
    for weight, other in zip(expected.model.parameters(), same.model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)
    assert others == pytest.approx(losses, abs=1e-6)


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PROGRAM))["main"](2)
    assert "accuracy 0." in capsys.readouterr().out
