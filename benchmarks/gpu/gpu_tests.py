"""Runs the tests that need a GPU, with pytest alone: no plugin of the development environment is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

MARK = "mark.gpu"
SETTINGS = "gpu.ini"
"""Beside the tests: pytest's settings in place of pyproject.toml, whose options need plugins and pytest 9."""
_END_S = 10.0


def run_gpu_tests(folder: Path, *, limit_s: float) -> str:
    """Runs them in a process of their own, which writes to this one's streams; after ``limit_s`` it is ended.

    Returns:
        Why they did not all pass, in one line; empty where they did.
    """
    if find_spec("pytest") is None:
        return "not run: this Python has no pytest"
    files = files_with_gpu_tests(folder)
    if not files:
        return f"not run: no test under {folder} needs a GPU"
    process = subprocess.Popen(command(folder, files), cwd=folder.parent, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGINT)  # pytest then names the test and its line
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return f"ended after {limit_s:.0f} s, before the last one"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"pytest ended with {code}; its output names the tests that failed" if code else ""


def files_with_gpu_tests(folder: Path) -> list[Path]:
    """The test files that mark something as needing a GPU: only these are read, others import what may be missing."""
    folders = (folder, folder.parent / "benchmarks" / "tests")
    files = [file for each in folders for file in sorted(each.rglob("test_*.py"))]
    return [file for file in files if MARK in file.read_text(encoding="utf-8")]


def command(folder: Path, files: Sequence[Path]) -> list[str]:
    """How pytest is called."""
    start = [sys.executable, "-m", "pytest", "-c", str(folder / SETTINGS), "--rootdir", str(folder.parent)]
    return [*start, "-m", "gpu", "-v", *map(str, files)]
