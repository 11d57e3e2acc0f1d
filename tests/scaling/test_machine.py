from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from lockstep_tools.scaling.machine import commit_of, this_machine


def test_the_machine_is_the_one_that_we_are_on():
    machine = this_machine()
    assert machine.torch == torch.__version__
    assert machine.cores >= 1
    assert machine.memory_gb > 0
    assert machine.processor


def test_outside_a_checkout_the_commit_is_unknown(tmp_path: Path):
    assert commit_of(tmp_path) == "unknown"


def test_local_changes_are_told(tmp_path: Path):
    def git(*words: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        command = ["git", *identity, "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "Begin")
    head = git("rev-parse", "--short=10", "HEAD")
    assert commit_of(tmp_path) == head

    (tmp_path / "a").write_text("")
    assert commit_of(tmp_path) == f"{head} and local changes"
