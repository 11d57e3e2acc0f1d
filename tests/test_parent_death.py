"""Guarded processes end when the guard kills them, when its maker ends, and when it was gone before they came."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.parent_death import ParentDeathGuard

FILE = Path(__file__).parents[1] / "src" / "lockstep" / "parent_death.py"
LIMIT_S = 30.0
# The file alone, as programs in environments without torch load it. A child of its own stays in its group.
HANG = f"""
import os, runpy, signal, sys
runpy.run_path({str(FILE)!r})["die_with"](sys.argv[1])
os.fork()
os.write(1, b"%d\\n" % os.getpid())
signal.pause()
"""
MAKE = f"""
import os, runpy, subprocess, sys
guard = runpy.run_path({str(FILE)!r})["ParentDeathGuard"]()
subprocess.Popen([sys.executable, "-c", {HANG!r}, guard.path], start_new_session=True)
sys.stdin.read()
"""


@pytest.fixture
def guard() -> Iterator[ParentDeathGuard]:
    made = ParentDeathGuard()
    yield made
    made.kill()


@contextmanager
def start(*words: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", *words], text=True, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def hanging(process: subprocess.Popen[str], number: int) -> list[int]:
    """Handles of processes that have said their number."""
    return [os.pidfd_open(int(process.stdout.readline())) for _ in range(number)]


def all_end(handles: list[int], limit_s: float = LIMIT_S) -> bool:
    ended = [bool(select.select([handle], [], [], limit_s)[0]) for handle in handles]
    for handle in handles:
        os.close(handle)
    return all(ended)


def test_the_whole_group_ends_when_the_guard_kills(guard: ParentDeathGuard):
    with start(HANG, guard.path, start_new_session=True) as process:
        handles = hanging(process, 2)
        guard.kill()
        assert all_end(handles)
    assert process.returncode == -signal.SIGKILL


def test_what_a_process_that_ended_has_left_behind_ends_too(guard: ParentDeathGuard):
    with start(HANG, guard.path, start_new_session=True) as process:
        handles = hanging(process, 2)
        process.kill()
        process.wait(LIMIT_S)
        guard.kill()
        assert all_end(handles)


def test_who_is_not_the_first_of_its_group_ends_alone(guard: ParentDeathGuard):
    with start(HANG, guard.path) as process:  # the group is this test's own
        handles = hanging(process, 2)
        guard.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL
        (forked,) = [handle for handle in handles if not select.select([handle], [], [], 0)[0]]
        signal.pidfd_send_signal(forked, signal.SIGKILL)
        assert all_end(handles)


def test_all_end_with_the_maker_of_the_guard():
    with start(MAKE, stdin=subprocess.PIPE) as maker:
        handles = hanging(maker, 2)
        maker.kill()
        assert all_end(handles)


def test_who_comes_too_late_ends_at_once(guard: ParentDeathGuard):
    path = guard.path
    guard.kill()
    with start(HANG, path, start_new_session=True) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == ""
    assert process.returncode == -signal.SIGKILL
