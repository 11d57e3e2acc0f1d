"""The programs of ``examples/coming_from``: each has the numbers of the other framework's program, which stands beside.

The others run in two processes, except for TensorFlow's, which has replicas in one.
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import FreePorts

os.environ.setdefault("KERAS_BACKEND", "torch")  # before any test imports Keras

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "coming_from"

LIMIT_S = 240
# Sums of two halves are rounded otherwise than sums of a whole, and Adam enlarges that: 2e-6 after 84 updates.
TOLERANCE = 1e-5

Weights = Mapping[str, np.ndarray]
Check = Callable[[str, Path, str], None]


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Runs a program in a folder, with these variables; what it prints."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_two(python: Callable[..., Any], program: Path, folder: Path, port: int) -> str:
    """Runs two processes of a program, each with the variables that ``torchrun`` gives it; what they print.

    If they do not end in time, the test fails with what both have printed and where they stood.
    """
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    job["PYTHONFAULTHANDLER"] = "1"
    processes = [python(str(program), folder=folder, RANK=rank, LOCAL_RANK=rank, **job, **place) for rank in ("0", "1")]
    try:
        printed = [process.communicate(timeout=LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGABRT)
        pytest.fail(f"not ended after {LIMIT_S} s: {[process.communicate(timeout=60) for process in processes]}")
    assert [process.returncode for process in processes] == [0, 0], printed
    return "".join(out for out, _ in printed)


def weights(folder: Path) -> Weights:
    """What a program has saved."""
    if (folder / "digits.pt").exists():
        return {name: value.numpy() for name, value in torch.load(folder / "digits.pt").items()}
    if (folder / "digits.keras").exists():
        from keras.saving import load_model

        return {str(place): value for place, value in enumerate(load_model(folder / "digits.keras").get_weights())}
    if (folder / "weights.npz").exists():
        return dict(np.load(folder / "weights.npz"))
    return {name: value.numpy() for name, value in load_file(folder / "trained" / "model.safetensors").items()}


def printed_numbers(text: str) -> list[float]:
    """Losses and accuracies, in the order in which they are named."""
    found = re.findall(r"\b(train_loss|loss|accuracy|val_loss|val_accuracy)\b'?:? '?(\d+\.\d+)", text)
    return [float(number) for _, number in sorted(found, key=lambda each: each[0])]


@pytest.fixture
def check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fresh_devices: object,
    one_core: None,
) -> Check:
    """``check(name, folder, printed)``: runs the program with Lockstep and compares it with the other."""

    def check(name: str, folder: Path, printed: str) -> None:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(FOLDER / f"{name}_after.py"), run_name="__main__")

        expected = printed_numbers(printed)
        assert len(set(expected)) >= 2
        assert printed_numbers(capsys.readouterr().out) == pytest.approx(expected, abs=2e-4)
        theirs, ours = weights(folder), weights(tmp_path)
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, rtol=0, atol=TOLERANCE, err_msg=key)

    return check


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("ddp", "torch"),
        ("accelerate", "accelerate"),
        ("fabric", "lightning"),
        ("lightning", "lightning"),
        ("transformers_trainer", "transformers"),
    ],
)
def test_two_replicas_have_the_numbers_of_two_processes(
    name: str,
    package: str,
    tmp_path_factory: pytest.TempPathFactory,
    python: Callable[..., Any],
    free_ports: FreePorts,
    check: Check,
):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp(name)
    check(name, folder, run_two(python, FOLDER / f"{name}_before.py", folder, *free_ports(1)))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_two_replicas_have_the_numbers_of_tensorflow(tmp_path_factory: pytest.TempPathFactory, check: Check):
    python = python_with_tensorflow()
    if python is None:
        pytest.skip("TensorFlow is not installed; `make .venv-peers/tensorflow/.installed` installs it beside")
    folder = tmp_path_factory.mktemp("tensorflow")
    printed = run([python, str(FOLDER / "tf_distribute_before.py")], folder, KERAS_BACKEND="tensorflow")
    check("tf_distribute", folder, printed)


@pytest.fixture(scope="module")
def _keras() -> None:
    """Imports Keras, which sets an environment variable, before the test."""
    pytest.importorskip("keras")


@pytest.mark.slow
@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize("name", ["keras", "keras_loop"])
def test_two_replicas_have_the_numbers_of_keras_on_one_device(
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    folder = tmp_path_factory.mktemp("keras")
    monkeypatch.chdir(folder)
    runpy.run_path(str(FOLDER / f"{name}_before.py"), run_name="__main__")
    check(name, folder, capsys.readouterr().out)


def python_with_tensorflow() -> str | None:
    """This interpreter, or that of `make bench SUITE=peers`."""
    if find_spec("tensorflow"):
        return sys.executable
    own = ROOT / ".venv-peers" / "tensorflow" / "bin" / "python"
    return str(own) if own.exists() else None


def pairs() -> list[tuple[Path, Path]]:
    return [(path, path.with_name(path.name.replace("_before", "_after"))) for path in FOLDER.glob("*_before.py")]


def changed_lines(one: Path, other: Path) -> list[int]:
    """The lines of ``one`` that are not in ``other``, from 1."""
    ours, theirs = (path.read_text().splitlines() for path in (one, other))
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    return [
        line + 1
        for kind, start, end, _, _ in matcher.get_opcodes()
        if kind != "equal"
        for line in range(start, end)
        if ours[line].strip()
    ]


def test_the_pages_show_the_lines_that_differ():
    """Each page includes both programs and marks what differs."""
    shown = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "coming-from").glob("*.md")))

    for one, other in [both for before, after in pairs() for both in ((before, after), (after, before))]:
        marked = re.search(rf"literalinclude}} .*/{one.name}\n(?::[a-z]+:.*\n)*:emphasize-lines: (\S+)\n", shown)
        numbers = [
            line
            for part in (marked[1] if marked else "").split(",")
            for line in range(int(part.split("-")[0] or 0), int(part.split("-")[-1] or -1) + 1)
        ]
        assert numbers == changed_lines(one, other), f"{one.name}: mark {_ranges(changed_lines(one, other))}"


def _ranges(lines: list[int]) -> str:
    """``[1, 2, 3, 7]`` as ``1-3,7``."""
    starts = [line for line in lines if line - 1 not in lines]
    ends = [line for line in lines if line + 1 not in lines]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
