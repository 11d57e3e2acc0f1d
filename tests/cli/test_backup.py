"""``--resume`` and ``--backup``: commands that signals interrupt, and that end with the bits of undisturbed ones."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.cli.conftest import Start
from tests.conftest import FreePorts

from lockstep.membership.failure_report import EXIT_OF_SURVIVOR

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "programs" / "interrupted.py")
LIMIT_S = 250
SETTINGS = {
    "--data": "pictures",
    "--size": "8",
    "--output-stride": "8",
    "--width-multiplier": "0.1",
    "--batch-size": "4",
    "--workers": "0",
    "--epochs": "2",
    # What is drawn anew in every epoch:
    "--shuffle-buffer": "7",
}
SMALL = [word for pair in SETTINGS.items() for word in pair]
UNDISTURBED = ["--output", "undisturbed", "--backup", "none"]
EVERY_4 = ["--output", "out", "--backup", "4"]  # of 5 an epoch: the second save is in the middle of the second epoch
RESUMED = [*EVERY_4, "--resume"]
NEVER = "SIGKILL never"


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path) -> Path:
    """train/ and test/ of two classes of noise: 20 and 4 pictures, of which 2 of the first validate."""
    folder, random = tmp_path / "pictures", np.random.default_rng(0)
    for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder / place).mkdir(parents=True)
        for number in range(10 if place.startswith("train") else 2):
            Image.fromarray(random.integers(256, size=(8, 8, 3), dtype="uint8")).save(folder / place / f"{number}.png")
    return folder


@pytest.fixture
def start(python: Start) -> Start:
    """``start("SIGKILL 9", ...)``: trains, and sends itself that signal after the ninth batch."""
    return lambda interruption, *words, **variables: python(
        PROGRAM, *interruption.split(), *SMALL, *words, OMP_NUM_THREADS="1", **variables
    )


@pytest.fixture
def start_both(start: Start, free_ports: FreePorts) -> Callable[..., list[subprocess.Popen[str]]]:
    """``start_both("SIGKILL 9", ...)``: two workers train together, of which the second sends itself that signal."""

    def begin(interruption: str, *words: str) -> list[subprocess.Popen[str]]:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
        tasks = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(2)]
        interruptions = [NEVER, interruption]
        return [
            start(each, *words, TF_CONFIG=json.dumps(task)) for each, task in zip(interruptions, tasks, strict=True)
        ]

    return begin


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, said = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, said


def came_to(folder: Path, output: str, worker: int = 0) -> tuple[Any, bytes, list[int]]:
    """The numbers of the run that ended last, its weights, and the batches of each epoch that it has on its clock."""
    told = json.loads((folder / f"result-{worker}.json").read_text())
    return told["numbers"], (folder / output / "model" / "model.safetensors").read_bytes(), told["done"]


def backups(folder: Path) -> list[str]:
    return [path.name for path in (folder / "out").glob("backup/step-*")]


@pytest.mark.parametrize(
    ("replicas", "interruption", "exit_code", "said", "step"),
    [
        (1, "SIGKILL 9", -signal.SIGKILL, "", 8),
        (2, "SIGTERM 6", 75, "", 7),  # it is heard after the next batch
        (3, "SIGINT 9", 130, "lockstep: interrupted; the same command with --resume continues it\n", 8),
    ],
)
def test_an_interrupted_run_goes_on_at_the_very_sample(
    replicas: int, interruption: str, exit_code: int, said: str, step: int, start: Start, tmp_path: Path
):
    devices = ["--devices", f"cpu:{replicas}"]
    assert ended(start(NEVER, *UNDISTURBED, *devices))[0] == 0
    numbers, weights, batches = came_to(tmp_path, "undisturbed")
    assert batches == [5, 5]

    code, out, error = ended(start(interruption, *EVERY_4, *devices))
    assert (code, error) == (exit_code, said)
    assert backups(tmp_path) == [f"step-{step:08d}"]
    saved = f"SIGTERM: saved epoch 2, {step - 5} batches done to out/backup/step-{step:08d}; start again to go on"
    assert (saved in out) == (code == 75)

    code, out, error = ended(start(NEVER, *RESUMED, *devices))
    assert (code, error) == (0, "")
    assert f"going on from out/backup/step-{step:08d}: epoch 2, {step - 5} batches done\n" in out
    assert came_to(tmp_path, "out") == (numbers, weights, [5, 10 - step])
    assert len(list((tmp_path / "out" / "logs").iterdir())) == 1  # one run, one folder
    assert not (tmp_path / "out" / "backup").exists()


@pytest.mark.workers
def test_workers_of_which_one_was_killed_go_on_at_the_very_sample(start_both, tmp_path: Path):
    assert [ended(worker)[0] for worker in start_both(NEVER, *UNDISTURBED)] == [0, 0]
    numbers, weights, _ = came_to(tmp_path, "undisturbed")

    (code, _, said), (killed, _, _) = map(ended, start_both("SIGKILL 9", *EVERY_4))
    assert (code, killed) == (EXIT_OF_SURVIVOR, -signal.SIGKILL)
    assert "worker 1" in said
    assert backups(tmp_path) == ["step-00000008"]

    assert [ended(worker)[0] for worker in start_both(NEVER, *RESUMED)] == [0, 0]
    assert [came_to(tmp_path, "out", worker) for worker in range(2)] == [(numbers, weights, [5, 2])] * 2
    assert not (tmp_path / "out" / "backup").exists()


def test_a_run_that_was_killed_before_its_report_need_not_train_again(start: Start, tmp_path: Path):
    words = ["--output", "out", "--epochs", "1"]
    assert ended(start("SIGKILL report", *words))[0] == -signal.SIGKILL
    numbers, weights, _ = came_to(tmp_path, "out")
    assert backups(tmp_path) == ["step-00000005"]

    code, out, error = ended(start("SIGKILL 1", *words, "--resume"))

    assert (code, error) == (0, "")
    assert came_to(tmp_path, "out") == (numbers, weights, [5])
    assert f"test    loss {numbers['test']['loss']:.4f}" in out
    assert (tmp_path / "out" / "curves.png").exists()
    assert not (tmp_path / "out" / "backup").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backup", "0"], "--backup 0 was given, expected epoch, none, or a number of global batches"),
        (["--backup", "none", "--resume"], "--backup none saves none; leave one of them out"),
        ([], "has the backup of an interrupted run, 'out/backup/step-00000008'; add --resume to continue it"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: list[str], said: str, start: Start, tmp_path: Path):
    (tmp_path / "out" / "backup" / "step-00000008").mkdir(parents=True)
    code, out, error = ended(start(NEVER, "--output", "out", *words))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert said in error
