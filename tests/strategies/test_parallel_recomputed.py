"""Gradient checkpointing on tensor ranks: dropout of what a rank holds by itself is drawn once more as it was."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lockstep as ls

pytestmark = [pytest.mark.workers, pytest.mark.timeout(330), pytest.mark.slow, pytest.mark.usefixtures("one_core")]
MODELS = Path(__file__).parent / "programs" / "small_models.py"
WAYS = [(sequences, checkpointing) for sequences in (False, True) for checkpointing in (False, True)]


def train(models: str, sequences: bool, checkpointing: bool) -> dict[str, Tensor]:
    small = runpy.run_path(models, run_name="small_models")
    torch.set_num_threads(1)
    options = ls.CommunicationOptions(lost_after_s=60)
    strategy = ls.ParallelStrategy(tensor=2, seed=7, sequence_parallel=sequences, communication=options)
    with strategy.scope():
        module = small["build"]("bert", layers=2, dropout=0.3)
        if checkpointing:
            module.gradient_checkpointing_enable()
        model = ls.Model(module)
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5), small["loss"])
        batches = [({"input_ids": x["input_ids"][:, :6]}, y[:, :6]) for x, y in small["batches"]((4, 3))]
        model.fit(batches, verbose=0)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    strategy.close()
    return weights


@cache
def every_way() -> dict[tuple[bool, bool], dict[str, Tensor]]:
    def all_of_them(models: str) -> list[dict[str, Tensor]]:
        return [train(models, *way) for way in WAYS]

    return dict(zip(WAYS, ls.launch(all_of_them, workers=2, args=(str(MODELS),), timeout_s=300), strict=True))


@pytest.mark.parametrize("sequences", [False, True], ids=["whole sequences", "divided sequences"])
def test_weights_are_those_without_checkpointing(sequences: bool):
    stored, recomputed = (every_way()[sequences, checkpointing] for checkpointing in (False, True))
    for name, value in stored.items():
        torch.testing.assert_close(recomputed[name], value, rtol=1e-12, atol=1e-12)
