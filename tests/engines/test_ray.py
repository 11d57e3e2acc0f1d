"""Ray Train's workers train one model with one device's numbers, and go on with the same bits when Ray restarts them.

Real Ray: a cluster of this host, whose driver runs one training after another. ``make test-engines`` installs it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="there is no ray here; make test-engines installs it in an environment of its own")
import torch
from tests.engines.ray_training import BATCHES, EPOCHS, batches, flat, make_module

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
KINDS = ("fit", "fit killed", "own loop", "tensor", "tensor killed", "replicas", "replicas killed fewer", "outside")

pytestmark = [pytest.mark.workers, pytest.mark.timeout(LIMIT_S + 60)]


def driven(program: Path, *words: str, folder: Path) -> str:
    """What a driver of Ray and its workers have printed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, str(program), *words],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the workers of all trainings have written what they saw."""
    folder = tmp_path_factory.mktemp("ray")
    driven(Path(__file__).with_name("ray_training.py"), str(folder), *KINDS, folder=folder)
    return folder


def seen(trainings: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads((trainings / f"{kind} {rank}.json").read_text()) for rank in range(2)]


def expected() -> list[float]:
    """The weights of a loop on one device."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in batches():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
    return flat(module.state_dict())


@pytest.mark.parametrize("kind", ["fit", "own loop", "tensor"])
def test_the_workers_train_one_model_with_the_numbers_of_one_device(trainings: Path, kind: str):
    first, second = seen(trainings, kind)
    assert first["workers"] == second["workers"] == 2
    assert first["threads"] == 1  # as Ray has set OMP_NUM_THREADS
    assert first["weights"] == second["weights"] == pytest.approx(expected(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ["fit", "tensor"])
def test_a_training_whose_worker_was_killed_ends_with_the_same_bits(trainings: Path, kind: str):
    assert (trainings / f"{kind} killed died").exists()
    killed = seen(trainings, f"{kind} killed")
    assert killed == seen(trainings, kind)
    assert killed[0]["epochs"] == [*range(EPOCHS)]


def test_a_training_that_goes_on_on_fewer_workers_ends_with_the_same_bits(trainings: Path):
    assert (trainings / "replicas killed fewer died").exists()
    fewer = json.loads((trainings / "replicas killed fewer 0.json").read_text())
    assert fewer["workers"] == 1
    assert fewer["weights"] == seen(trainings, "replicas")[0]["weights"]


def test_numbers_and_checkpoints_are_reported(trainings: Path):
    metrics = json.loads((trainings / "fit.json").read_text())
    assert (metrics["epoch"], metrics["step"]) == (EPOCHS - 1, EPOCHS * BATCHES)
    assert metrics["loss"] > 0
    reported = [*(trainings / "results" / "fit").glob("checkpoint_*/checkpoint.json")]
    assert len(reported) == EPOCHS * BATCHES // 3
    # The chief of the first attempt was ended by Ray in the middle of the training that was killed.
    left = [*(trainings / "shared").glob("lockstep-ray-*")]
    assert len(left) <= 1


def test_the_callback_is_refused_outside_a_train_function(trainings: Path):
    error = json.loads((trainings / "outside.json").read_text())
    assert error.startswith("RayTrain reports to Ray Train, and was not made in a train function of it; make it in")


def test_the_example_trains(tmp_path: Path):
    printed = driven(ROOT / "examples" / "ray" / "train.py", "--epochs", "2", "--storage", "stored", folder=tmp_path)
    told = re.search(r"validation: loss (\d\.\d+); checkpoint: (\S+)", printed)
    assert told is not None, printed[-5_000:]
    assert float(told[1]) < 2.3
    assert (Path(told[2]) / "checkpoint.json").exists()
