from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from lockstep.atomic_files import atomic_file, atomic_write

KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.atomic_files import atomic_file

with atomic_file(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_holds_the_text_and_nothing_is_beside_it(tmp_path: Path):
    path = tmp_path / "new" / "a.json"
    atomic_write(path, "first\r\n")
    atomic_write(path, "zweite Fassung: ü\n")
    assert path.read_bytes() == "zweite Fassung: ü\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_file_name_that_is_not_utf_8_is_written_with_its_bytes(tmp_path: Path):
    name = os.fsdecode(b"\xd6\xd0.png")  # in GBK
    assert atomic_write(tmp_path / "list.txt", f"{name}\u4e2d\n").read_bytes() == b"\xd6\xd0.png\xe4\xb8\xad\n"


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "a.json"
    atomic_write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        atomic_write(tmp_path / "file" / "a.json", "text")


@pytest.mark.parametrize("name", ["a.json", "a[1].json"])
def test_what_a_killed_writer_left_is_cleared_away_by_the_next(
    name: str, tmp_path: Path, python: Callable[..., Popen[str]]
):
    path = tmp_path / "new" / name
    assert python("-c", KILLED, str(path)).wait(60) == -signal.SIGKILL
    (left,) = path.parent.iterdir()
    (path.parent / "a.json.partial").touch()
    assert left.read_text() == "half"
    atomic_write(path, "whole")
    assert {each.name for each in path.parent.iterdir()} == {name, "a.json.partial"}


def test_what_a_living_writer_writes_is_left_alone(tmp_path: Path):
    with atomic_file(tmp_path / "a.json") as partial:
        partial.write_text("slow")
        atomic_write(tmp_path / "a.json", "fast")
    assert (tmp_path / "a.json").read_text() == "slow"


@pytest.mark.parametrize("still_there", [False, True])
def test_a_file_that_is_taken_for_a_dead_writer_s_before_it_is_locked_is_made_again(
    still_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock, others = fcntl.flock, []

    def lock_late(descriptor: int, how: int) -> None:
        if not others:  # somebody who clears away has the lock first, and may have it still
            (made,) = tmp_path.iterdir()
            others.append(made.open("rb"))
            lock(others[0], how)
            made.unlink()
            if not still_there:
                others[0].close()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)

    atomic_write(tmp_path / "a.json", "text")
    others[0].close()

    assert (tmp_path / "a.json").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_on_a_file_system_without_locks_files_are_written_and_nothing_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    left = tmp_path / ".a.json.0123456789ab.partial"
    left.touch()
    atomic_write(tmp_path / "a.json", "text")
    assert set(tmp_path.iterdir()) == {tmp_path / "a.json", left}
