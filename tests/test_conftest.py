"""The watch over leaks is itself watched: a test that leaks fails and says what it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LEAKY = """
import os, subprocess, sys, threading

never = threading.Event()

def test_thread():
    threading.Thread(target=never.wait, name="a-leaked-thread", daemon=True).start()

def test_process():
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_variable():
    os.environ["A_LEAKED_VARIABLE"] = "1"

def test_file():
    open("a-leaked-file", "w").close()

def test_clean(fresh_devices, split_cpu):
    assert [device.name for device in split_cpu(3)] == ["cpu:0", "cpu:1", "cpu:2"]
"""


def test_a_test_that_leaks_fails_and_names_what_it_left(tmp_path: Path):
    conftest = (Path(__file__).parent / "conftest.py").read_text().replace("GRACE_S = 5.0", "GRACE_S = 0.2")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_leaky.py").write_text(LEAKY)

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "test_leaky.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )

    assert "5 passed, 4 errors" in done.stdout
    for leak in (
        "thread 'a-leaked-thread'",
        "child process",
        "environment variable A_LEAKED_VARIABLE",
        "file a-leaked-file",
    ):
        assert f"left behind: {leak}" in done.stdout
