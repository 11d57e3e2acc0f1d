"""Runs the tests that need a GPU, with pytest alone: no plugin of the development environment is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

MARK = "mark.gpu"
SETTINGS = "gpu.ini"
"""Beside the tests: pytest's settings in place of pyproject.toml, whose options need plugins and pytest 9."""
_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class SuiteOutcome:
    """What came of the tests."""

    passed: int = 0  # how many
    skipped: int = 0  # how many
    failed: tuple[str, ...] = ()  # names of those that failed or could not be set up
    seconds: float = 0.0  # from start to end
    trouble: str = ""  # why there is no outcome, or no whole one; empty where there is

    @property
    def ok(self) -> bool:
        """Whether tests ran, and all to a good end."""
        return not self.trouble and not self.failed and self.passed > 0

    @property
    def text(self) -> str:
        counted = f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped in {self.seconds:.0f} s"
        if not self.trouble:
            return counted
        return f"{self.trouble}; {counted}" if self.passed or self.failed else self.trouble


def files_with_gpu_tests(folder: Path) -> list[Path]:
    """The test files that mark something as needing a GPU: only these are read, others import what may be missing."""
    folders = (folder, folder.parent / "benchmarks" / "tests")
    files = [file for each in folders for file in sorted(each.rglob("test_*.py"))]
    return [file for file in files if MARK in file.read_text(encoding="utf-8")]


def run_suite(folder: Path, *, limit_s: float) -> SuiteOutcome:
    """Runs them in a process of their own, which writes to this one's streams.

    After ``limit_s`` they are interrupted; the outcomes until then count.
    """
    if find_spec("pytest") is None:
        return SuiteOutcome(trouble="not run: this Python has no pytest")
    files = files_with_gpu_tests(folder)
    if not files:
        return SuiteOutcome(trouble=f"not run: no test under {folder} needs a GPU")
    began = time.monotonic()
    with TemporaryDirectory(prefix="lockstep-gpu-tests-") as scratch:
        report = Path(scratch) / "report.xml"
        code, in_time = _run(command(folder, files, report), folder.parent, limit_s)
        seconds = time.monotonic() - began
        if not report.exists():
            ended = f"pytest ended with {code}" if in_time else f"ended after {limit_s:.0f} s"
            return SuiteOutcome(trouble=f"{ended} and no report", seconds=seconds)
        text = report.read_text(encoding="utf-8")
        trouble = "" if in_time else f"ended after {limit_s:.0f} s, in the test after {last_done(text)}"
        return replace(outcome_of(text, seconds), trouble=trouble)


def command(folder: Path, files: Sequence[Path], report: Path) -> list[str]:
    """How pytest is called."""
    return [
        *(sys.executable, "-m", "pytest", "-c", str(folder / SETTINGS), "--rootdir", str(folder.parent)),
        *("-m", "gpu", "-v", f"--junitxml={report}"),
        *map(str, files),
    ]


def outcome_of(report: str, seconds: float) -> SuiteOutcome:
    """The outcome that a JUnit report tells. Pure.

    A test that was interrupted has a case there like one that passed, so those that passed are counted by its totals.
    """
    suite = next(ElementTree.fromstring(report).iter("testsuite"))
    total, *others = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    failed = [_name(case) for case in suite.iter("testcase") if {"failure", "error"} & {part.tag for part in case}]
    return SuiteOutcome(
        passed=max(0, total - sum(others)), skipped=others[-1], failed=tuple(dict.fromkeys(failed)), seconds=seconds
    )


def last_done(report: str) -> str:
    """The last test that a JUnit report names; one that was interrupted has no name there. Pure."""
    named = [_name(case) for case in ElementTree.fromstring(report).iter("testcase") if case.get("name")]
    return named[-1] if named else "none"


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _run(command: Sequence[str], beside: Path, limit_s: float) -> tuple[int, bool]:
    """The exit code, and whether it ended in time: else it was interrupted, to write its report, and then killed."""
    process = subprocess.Popen(command, cwd=beside, start_new_session=True)
    try:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s), True
        os.kill(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, False
