"""Runs the tests that need a GPU, with pytest alone: no plugin of the development environment is asked for.

Each file of tests has a process and a time limit of its own: an error that CUDA keeps for the rest of a process, a
crash or a hang ends the tests of that file alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lockstep_tools.report import markdown_table

MARK = "mark.gpu"
SETTINGS = "gpu.ini"
"""Beside the tests: pytest's settings in place of pyproject.toml, whose options need plugins and pytest 9."""
FIRST = ("test_on_gpu.py", "test_fit_gpu.py", "test_mirrored_gpu.py")
"""The files to begin with, in this order: when the time runs out, the others are left out."""
_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GpuTest:
    """What came of one test."""

    name: str  # as pytest writes it
    outcome: str  # "passed", "failed", "skipped" or "did not end"
    seconds: float = 0.0
    seen: str = ""  # what the test has noted, or why it did not pass


@dataclass(frozen=True, kw_only=True)
class GpuTests:
    """What came of all."""

    ran: Sequence[GpuTest]
    failures: Sequence[str]  # of whole files, and why there are no others

    @property
    def ok(self) -> bool:
        """Whether some passed, and all others were skipped."""
        outcomes = {test.outcome for test in self.ran}
        return not self.failures and "passed" in outcomes and outcomes <= {"passed", "skipped"}

    @property
    def text(self) -> str:
        """In one line: "37 passed, 1 failed, 3 skipped"."""
        counts = Counter(test.outcome for test in self.ran)
        return "; ".join([", ".join(f"{number} {outcome}" for outcome, number in counts.items()), *self.failures])

    @property
    def table(self) -> str:
        """All of them, in Markdown."""
        rows = [
            [test.name.replace("|", "/"), test.outcome, f"{test.seconds:.1f}", test.seen.replace("|", "/")]
            for test in self.ran
        ]
        return markdown_table(("test", "outcome", "s", "seen"), rows)


def run_gpu_tests(folder: Path, *, limit_s: float, file_limit_s: float) -> GpuTests:
    """Runs them, and shows what they print. All end within ``limit_s``, those of a file within ``file_limit_s``."""
    if find_spec("pytest") is None:
        return GpuTests(ran=(), failures=("not run: this Python has no pytest",))
    files = files_with_gpu_tests(folder)
    if not files:
        return GpuTests(ran=(), failures=(f"not run: no test under {folder} needs a GPU",))
    until_s = time.monotonic() + limit_s
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        lines = Path(temporary, "lines")
        lines.touch()
        for file in files:
            left_s = until_s - time.monotonic()
            words, why = command(folder, file, lines), "no time was left"
            if left_s <= 0 or (why := _run(words, folder.parent, min(file_limit_s, left_s))):
                failures.append(f"{file.name}: {why}")
        return GpuTests(ran=_read(lines), failures=failures)


def _run(words: Sequence[str], folder: Path, limit_s: float) -> str:
    """Runs pytest in a process of its own; returns why it was ended, or did not end by itself."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # for the plugin
    process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGINT)  # pytest then names the test and its line
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return f"ended after {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "" if code in (0, 1) else f"pytest ended with {code}"  # 1: some failed, as their lines say


def _read(lines: Path) -> list[GpuTest]:
    """The last line of each test."""
    written = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
    return list({values["name"]: GpuTest(**values) for values in written}.values())


def files_with_gpu_tests(folder: Path) -> list[Path]:
    """The test files that mark something as needing a GPU: only these are read, others import what may be missing."""
    folders = (folder, folder.parent / "benchmarks" / "tests")
    files = [file for each in folders for file in sorted(each.rglob("test_*.py"))]
    marked = [file for file in files if MARK in file.read_text(encoding="utf-8")]
    return sorted(marked, key=lambda file: FIRST.index(file.name) if file.name in FIRST else len(FIRST))


def command(folder: Path, file: Path, lines: Path) -> list[str]:
    """How pytest is called."""
    start = [sys.executable, "-m", "pytest", "-c", str(folder / SETTINGS), "--rootdir", str(folder.parent)]
    return [*start, "-p", "benchmarks.gpu.pytest_lines", "--lines", str(lines), "-m", "gpu", "-v", str(file)]
