"""The command as a person starts it: a process of its own, in a folder of its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from lockstep.cli import main

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

LIMIT_S = 170
# The server that commands are forked from has these, so that not every one of them imports torch for two seconds, and
# torchmetrics for three. It is the one of `lockstep verify` too, which asks for the first three.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "lockstep",
    "lockstep.verify.child",
    "lockstep.cli.app",
    "torchmetrics.classification",
    "transformers.models.bert.modeling_bert",
]


@pytest.fixture
def run_lockstep(tmp_path: Path) -> Run:
    """``run_lockstep("devices", ...)``: runs the command to its end, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        said = tmp_path.parent / f"{tmp_path.name}-said"
        said.mkdir(exist_ok=True)
        process = context.Process(target=command, args=(words, tmp_path, said, dict(os.environ)))
        process.start()
        process.join(LIMIT_S)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
            pytest.fail(f"lockstep {' '.join(words)} was not done after {LIMIT_S} s")
        process.close()
        out, err = ((said / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)

    return run


def command(words: Sequence[str], folder: Path, said: Path, variables: Mapping[str, str]) -> None:
    """The life of a command's process."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for stream, name in ((1, "out"), (2, "err")):
        with (said / name).open("wb") as file:
            os.dup2(file.fileno(), stream)
    multiprocessing.set_start_method(None, force=True)
    sys.exit(main(words))


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


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """``write(text)``: a program of that text, where the command runs."""

    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return "program.py"

    return write
