"""The command as a person starts it: a process of its own, in a folder of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

LIMIT_S = 250


@pytest.fixture
def start_lockstep(python: Start) -> Start:
    """``start_lockstep("train", ...)``: starts the command; what is still running at the end of the test is killed."""
    return partial(python, "-m", "lockstep.cli")


@pytest.fixture
def run_lockstep(start_lockstep: Start) -> Run:
    """``run_lockstep("devices", ...)``: runs the command to its end, in a process of its own."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        process = start_lockstep(*words)
        out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


@pytest.fixture
def train_on_two_workers(run_lockstep: Run, tmp_path: Path) -> Callable[..., None]:
    """``train_on_two_workers("images", "--output", "out")``: both train, and the chief alone prints and writes."""

    def train(*words: str) -> None:
        recipe = ("-m", "lockstep.cli", "train", *words, "--devices", "cpu:1", "--epochs", "1")

        done = run_lockstep("run", "--workers", "2", "--output", "all", "--quiet", *recipe)

        assert done.returncode == 0, done.stderr
        assert "[0] 2 workers, 2 replicas: worker 0 (" in done.stdout
        assert [line[:3] for line in done.stdout.splitlines() if "test    loss" in line] == ["[0]"]
        assert not any(line.startswith("[1]") for line in done.stdout.splitlines())
        assert (tmp_path / "out" / "model" / "model.safetensors").is_file()

    return train


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """``write(text)``: a program of that text, where the command runs."""

    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return "program.py"

    return write
