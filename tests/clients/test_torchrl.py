"""The program of examples/clients gives the weights of TorchRL's own loop on one device."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrl")

PROGRAM = Path(__file__).parents[2] / "examples" / "clients" / "torchrl_ppo.py"


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_divided_loss_equals_torchrl_s(replicas: int) -> None:
    torch.set_num_threads(1)
    program = runpy.run_path(str(PROGRAM))
    expected, same = program["train_on_one_device"](), program["train"](replicas)
    before = program["networks"]()[1].parameters()
    assert any(not torch.equal(weight, first) for weight, first in zip(expected.parameters(), before, strict=False))
    for weight, other in zip(expected.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)
