"""The program of examples/clients gives skorch's own numbers on one device."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("skorch")

from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier

import lockstep as ls

PROGRAM = Path(__file__).parents[2] / "examples" / "clients" / "skorch_net.py"


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_divided_net_equals_skorch_s(replicas: int) -> None:
    torch.set_num_threads(1)
    program, digits = runpy.run_path(str(PROGRAM)), load_digits()
    pixels, labels = digits.data.astype("float32")[:500] / 16, digits.target[:500]  # 8 batches, the last of 52 rows
    expected = program["net"](NeuralNetClassifier).fit(pixels, labels)
    strategy = ls.MirroredStrategy(replicas=replicas)
    same = program["net"](program["ReplicaNet"], strategy=strategy, criterion__reduction="none").fit(pixels, labels)
    for weight, other in zip(expected.module_.parameters(), same.module_.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)
    for name in ("train_loss", "right"):
        assert same.history[:, name] == pytest.approx(expected.history[:, name], abs=1e-6)


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PROGRAM))["main"](2)
    assert "accuracy 0." in capsys.readouterr().out
