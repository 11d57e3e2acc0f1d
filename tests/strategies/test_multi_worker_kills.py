"""Two workers whose processes are killed at random moments, saves included, and started again: the end is the same.

LOCKSTEP_TEST_KILLS=30 makes it longer, LOCKSTEP_TEST_SEED another; with -s it prints what was killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.checkpoint.weights import read_weights
from lockstep.membership.failure_report import EXIT_OF_SURVIVOR

pytestmark = [pytest.mark.workers, pytest.mark.slow]

KILLS = int(os.environ.get("LOCKSTEP_TEST_KILLS", "4"))
SEED = int(os.environ.get("LOCKSTEP_TEST_SEED", "0"))
BATCHES = 6  # an epoch
EPOCHS = KILLS + 2  # so many that no run comes to its end before it is killed
MOST_BATCHES = 4
BATCH_S = 0.05


# What the workers run.


def train(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    options = ls.CommunicationOptions(lost_after_s=2)
    strategy = ls.MultiWorkerMirroredStrategy(seed=7, communication=options, timeout_s=60)
    torch.manual_seed(1)
    numbers = torch.Generator().manual_seed(0)
    rows = 8 * BATCHES - 3  # the last batch is short
    data = TensorDataset(torch.randn(rows, 4, generator=numbers), torch.randn(rows, 1, generator=numbers))
    with strategy.scope():
        module = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Dropout(0.3), nn.Linear(256, 1))
        model = ls.Model(module)
        model.compile(torch.optim.Adam(module.parameters(), 0.01), nn.MSELoss(reduction="none"))
        backup = ls.BackupAndRestore(folder, save_freq=1, delete_checkpoint=False)
        tell = ls.LambdaCallback(on_train_batch_end=lambda batch, logs: say("batch"))
        batches: DataLoader[tuple[Tensor, ...]] = DataLoader(data, 8, shuffle=True)
        model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[tell, backup])
    model.save_weights(out)
    strategy.close()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# What the test does to them.


def kill(job: list[Any], moment: random.Random) -> str:
    """Kills one of them, or both, at a moment; what was under way then."""
    for _ in range(moment.randint(1, MOST_BATCHES)):
        job[0].wait_for("batch\n")
    threading.Event().wait(moment.uniform(0, BATCH_S))
    victims = moment.choice([[0], [1], [0, 1]])
    for victim in victims:
        job[victim].send(signal.SIGKILL)
    assert [job[victim].end() for victim in victims] == [-signal.SIGKILL] * len(victims)
    for other in {0, 1} - set(victims):
        assert job[other].end() == EXIT_OF_SURVIVOR
        assert f"worker {victims[0]} " in job[other].error
    return f"killed {' and '.join(map(str, victims))}"


def test_a_run_that_is_killed_again_and_again_ends_with_the_weights_of_one_that_was_not(start_job: Any, tmp_path: Path):
    undisturbed = start_job(train, str(tmp_path / "none"), str(tmp_path / "undisturbed.safetensors"))
    assert [worker.end() for worker in undisturbed] == [0, 0], [worker.errors for worker in undisturbed]
    moment, seen = random.Random(SEED), Counter[str]()
    folder, out = str(tmp_path / "backup"), tmp_path / "killed.safetensors"

    for _ in range(KILLS):
        seen[kill(start_job(train, folder, str(out)), moment)] += 1
        seen["in a save"] += any(path.name.endswith(".partial") for path in Path(folder).iterdir())
    last = start_job(train, folder, str(out))

    assert [worker.end() for worker in last] == [0, 0], [worker.errors for worker in last]
    say(f"{KILLS} kills, {dict(seen)}")
    expected, found = read_weights(tmp_path / "undisturbed.safetensors"), read_weights(out)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
