"""The command as a person starts it: a process of its own, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_lockstep(tmp_path: Path) -> Run:
    """``run_lockstep("devices", ...)``: runs the command to its end and returns what it printed."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lockstep.cli", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)

    return run


@pytest.fixture
def start_lockstep(tmp_path: Path) -> Iterator[Start]:
    """``start_lockstep("train", ...)``: starts the command; what is still running at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lockstep.cli", *words]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, bufsize=1)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
