"""LockstepStrategy on two workers of two replicas each: one device's numbers on both, and files of the chief alone."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning")

import lockstep as ls  # noqa: E402  what it needs is there

pytestmark = [pytest.mark.workers, pytest.mark.slow]

FEATURES = str(Path(__file__).parent / "test_lightning.py")
TASKS = ("metrics", "one row, with metrics", "attributes", "logs", "accumulation", "gathered")


def job(folder: str) -> dict[str, Any]:
    """Trains each task in a job of two workers; returns the weights and what callbacks saw at the end."""
    torch.set_num_threads(1)
    features = runpy.run_path(FEATURES)
    strategy, outcomes = ls.MultiWorkerMirroredStrategy(replicas=4), {}
    for name in TASKS:
        chosen = features["LockstepStrategy"](strategy=strategy)
        module, numbers = features["trained"](features["TASKS"][name], chosen)
        outcomes[name] = (dict(module.state_dict()), numbers[-1])
    torch.manual_seed(0)
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(f"{folder}/{os.environ['RANK']}", filename="{step}")
    trainer = features["trainer_with"](
        features["LockstepStrategy"](strategy=strategy), callbacks=[checkpoint], enable_checkpointing=True
    )
    trainer.fit(features["Network"](), features["data"](29))
    strategy.close()
    return outcomes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    outcomes = ls.launch(job, workers=2, args=(str(folder),), timeout_s=170)
    return {"folder": folder, "outcomes": outcomes}


@pytest.mark.parametrize("name", TASKS)
def test_the_numbers_are_those_of_one_device(results: dict[str, Any], name: str) -> None:
    features = runpy.run_path(FEATURES)
    module, numbers = features["trained"](features["TASKS"][name], "auto")
    weights, last = results["outcomes"][name]
    torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-6, atol=1e-6)
    for numbers_of in (last, numbers[-1]):
        numbers_of.pop("gradient", None)
    assert last == pytest.approx(numbers[-1], rel=2e-6, abs=1e-6)


def test_the_chief_alone_writes(results: dict[str, Any]) -> None:
    assert [path.name for path in results["folder"].iterdir()] == ["0"]
    assert [path.name for path in (results["folder"] / "0").iterdir()] == ["step=8.ckpt"]
