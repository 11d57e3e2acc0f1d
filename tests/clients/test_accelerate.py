"""The program of examples/clients gives the numbers of Accelerate's script in one process."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

PROGRAM = Path(__file__).parents[2] / "examples" / "clients" / "accelerate_metrics.py"


@pytest.mark.parametrize("replicas", [2, 3])
def test_accumulate_and_gather_for_metrics(replicas: int) -> None:
    torch.set_num_threads(1)
    program = runpy.run_path(str(PROGRAM))
    (expected, accuracy), (same, other) = program["with_accelerate"](), program["on_replicas"](replicas)
    for weight, copy in zip(expected.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(copy, weight, rtol=1e-6, atol=1e-6)
    assert accuracy == other > 0.3
