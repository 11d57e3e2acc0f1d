from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.atomic_files import atomic_folder, original_name, remove_folder, remove_leftovers, replaced_folders

RECORD = "record.json"


def fill(target: Path, text: str) -> None:
    with atomic_folder(target, record=RECORD) as (folder, write_record):
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)
        write_record(text)


def test_the_folder_appears_with_its_record_and_nothing_beside_it(tmp_path: Path):
    target = tmp_path / "new" / "step-1"
    with atomic_folder(target, record=RECORD) as (folder, write_record):
        assert folder.parent == target.parent
        assert folder.name.startswith(".step-1.")
        write_record("{}")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["step-1"]
    assert (target / RECORD).read_text() == "{}"


def test_one_of_that_name_is_replaced(tmp_path: Path):
    fill(tmp_path / "step-1", "old")
    fill(tmp_path / "step-1", "new")
    assert (tmp_path / "step-1" / "deep" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_an_error_leaves_the_old_one_and_nothing_else(tmp_path: Path):
    fill(tmp_path / "step-1", "old")

    def fails() -> None:
        with atomic_folder(tmp_path / "step-1", record=RECORD) as (folder, _):
            (folder / "file").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fails()

    assert (tmp_path / "step-1" / RECORD).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_where_the_last_rename_fails_the_old_one_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path / "step-1", "old")
    rename = Path.rename

    def fails(source: Path, target: Path) -> Path:
        if source.name.endswith(".partial") and not target.exists():
            raise PermissionError(13, "no")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(PermissionError):
        fill(tmp_path / "step-1", "new")

    assert (tmp_path / "step-1" / RECORD).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_every_byte_and_name_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append("partial" if path.name.endswith(".partial") else path.name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda source, target: (events.append("rename"), rename(source, target))[1])

    fill(tmp_path / "step-1", "text")

    assert set(events[: events.index("rename")]) == {"file", "deep", RECORD, "partial"}
    assert events[events.index("rename") :] == ["rename", tmp_path.name]


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path):
    (tmp_path / ".step-1.0123456789ab.partial" / "state").mkdir(parents=True)
    (tmp_path / ".step-1.0123456789ab.partial" / RECORD).touch()
    (tmp_path / ".step-2.0123456789ab.partial").mkdir()
    (tmp_path / ".step-3.0123456789ab.removed").mkdir()
    (tmp_path / "mine.partial").mkdir()
    remove_leftovers(tmp_path, record=RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.partial"]


def test_what_a_living_writer_writes_is_left_alone(tmp_path: Path):
    with atomic_folder(tmp_path / "step-1", record=RECORD) as (folder, write_record):
        (folder / "file").write_text("half")
        remove_leftovers(tmp_path, record=RECORD)
        write_record("{}")
    assert (tmp_path / "step-1" / "file").read_text() == "half"


def test_an_old_one_without_successor_is_put_back(tmp_path: Path):
    fill(tmp_path / "step-1", "old")
    (tmp_path / "step-1").rename(tmp_path / ".step-1.0123456789ab.replaced")
    fill(tmp_path / ".step-2.0123456789ab.replaced", "older")
    fill(tmp_path / "step-2", "new")
    assert [original_name(path) for path in replaced_folders(tmp_path)] == ["step-1"]
    remove_leftovers(tmp_path, record=RECORD)
    assert {path.name: (path / RECORD).read_text() for path in tmp_path.iterdir()} == {"step-1": "old", "step-2": "new"}


def before_the_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]) -> None:
    """Lets somebody act, once, when a writer has made its folder and not yet locked its record."""
    once, opened = [act], os.open

    def open_late(path: Path, flags: int, mode: int = 0o777, **more: Any) -> int:
        if once and flags & os.O_CREAT:
            once.pop()(Path(path).parent)
        return opened(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", open_late)


@pytest.mark.parametrize("act", [lambda folder: remove_leftovers(folder.parent, record=RECORD), shutil.rmtree])
def test_a_writer_whose_folder_is_cleared_before_it_is_locked_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]
):
    before_the_lock(monkeypatch, act)
    fill(tmp_path / "step-1", "text")
    assert (tmp_path / "step-1" / RECORD).read_text() == "text"


def test_a_writer_whose_record_is_cleared_while_it_is_locked_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock, once = fcntl.flock, [True]

    def lock_late(record: int, how: int) -> None:
        if once:
            once.clear()
            remove_leftovers(
                tmp_path, record=RECORD
            )  # it has the lock first, takes the folder away, and gives the lock up
        lock(record, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)

    fill(tmp_path / "step-1", "text")

    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_that_somebody_removes_while_it_is_written_is_an_error(tmp_path: Path):
    def write() -> None:
        with atomic_folder(tmp_path / "step-1", record=RECORD) as (folder, _):
            shutil.rmtree(folder)

    with pytest.raises(FileNotFoundError):
        write()


def test_two_writers_of_one_name_both_succeed(tmp_path: Path):
    with atomic_folder(tmp_path / "step-1", record=RECORD) as (_, write_record):
        write_record("first")
        fill(tmp_path / "step-1", "second")
    assert (tmp_path / "step-1" / RECORD).read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_is_removed_at_once_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path / "step-1", "text")
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as if killed here
    remove_folder(tmp_path / "step-1")
    assert [path.suffix for path in tmp_path.iterdir()] == [".removed"]


def test_what_others_still_write_to_an_abandoned_folder_is_cleared_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    remove = shutil.rmtree

    def remove_what_is_there(folder: Path, **_: Any) -> None:
        (folder / RECORD).unlink()
        (folder / "late").write_text("by another worker")

    monkeypatch.setattr(shutil, "rmtree", remove_what_is_there)
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "step-1", record=RECORD):
        raise RuntimeError
    monkeypatch.setattr(shutil, "rmtree", remove)
    remove_leftovers(tmp_path, record=RECORD)

    assert list(tmp_path.iterdir()) == []


def test_what_one_who_clears_away_is_killed_over_the_next_one_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = tmp_path / ".step-1.0123456789ab.partial"
    (left / "deep").mkdir(parents=True)
    (left / RECORD).touch()
    remove = shutil.rmtree

    def is_killed(folder: Path, **_: Any) -> None:
        (folder / RECORD).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", is_killed)
    with pytest.raises(KeyboardInterrupt):
        remove_leftovers(tmp_path, record=RECORD)
    monkeypatch.setattr(shutil, "rmtree", remove)
    remove_leftovers(tmp_path, record=RECORD)

    assert list(tmp_path.iterdir()) == []
