"""The program of examples/clients gives fastai's own numbers on one device, with fastai's own optimizer."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastai")

from fastai.basics import Learner  # noqa: E402  what it needs is there

import lockstep as ls  # noqa: E402

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


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PROGRAM))["main"](2)
    assert "accuracy 0." in capsys.readouterr().out
