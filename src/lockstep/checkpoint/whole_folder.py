"""Folders that appear whole or not at all, also when their writer is killed at any moment.

    .NAME.<random>.partial: record held locked -> files -> record -> fsync of all -> rename to NAME -> fsync above

The record is the one file that every such folder has. Its lock tells a folder that is being written from one whose
writer is dead, by which the next writer knows what to clear away: a lock ends with its process. Where NAME exists, the
old one is called ``.NAME.<random>.replaced`` for the moment between the two renames, and is put back by whoever finds
it without a successor.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.checkpoint.whole_file import sync
from lockstep.checkpoint.writer_lock import hold, writer_is_dead

RECORD = "checkpoint.json"
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


@contextmanager
def whole_folder(target: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Gives a folder to fill, and a function that writes its record; it becomes ``target`` when the block ends.

    Raises:
        OSError: it cannot be written; then nothing is left behind, as after any error in the block.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, record = _begin(target)
    try:

        def write_record(text: str) -> None:
            with os.fdopen(os.dup(record), "w", encoding="utf-8") as file:
                file.write(text)

        yield partial, write_record
        _sync_tree(partial)
        _put(partial, target)
        sync(target.parent)
    finally:
        os.close(record)
        _discard(partial, target)


def remove_folder(path: Path) -> None:
    """Removes a whole folder: at once under its name, then file by file."""
    gone = _aside(path, _REMOVED)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Clears away what killed writers have left in ``parent``, and puts a replaced folder without successor back.

    Folders that a living process is writing are left alone.
    """
    for path in parent.glob(f".*{_REPLACED}"):
        target = parent / original_name(path)
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)
    for path in parent.glob(f".*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f".*{_PARTIAL}"):
        _clear_partial(path)


def replaced_folders(parent: Path) -> list[Path]:
    """Whole folders whose name a killed writer was about to give to a newer one."""
    return sorted(path for path in parent.glob(f".*{_REPLACED}") if not (parent / original_name(path)).exists())


def original_name(aside: Path) -> str:
    """``step-1`` for ``.step-1.0123456789ab.replaced``."""
    return aside.name[1:].rsplit(".", 2)[0]


def _begin(target: Path) -> tuple[Path, int]:
    """A fresh folder and its record, locked. Whoever clears away may take it before it is locked: then once more."""
    while True:
        partial = _aside(target, _PARTIAL)
        partial.mkdir()
        try:
            record = os.open(partial / RECORD, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            continue
        except OSError:
            partial.rmdir()
            raise
        if hold(record):
            return partial, record
        os.close(record)


def _clear_partial(path: Path) -> None:
    try:
        record = os.open(path / RECORD, os.O_RDWR)
    except FileNotFoundError:  # its writer was killed between two calls, or is between them: an empty folder
        _remove_if_empty(path)
        return
    except OSError:  # not ours to clear
        return
    try:
        if writer_is_dead(record):
            # Under another name first: whoever is killed in the middle of it may have removed the record, and no more.
            shutil.rmtree(path.rename(_aside(path.with_name(original_name(path)), _REMOVED)), ignore_errors=True)
    except FileNotFoundError:  # another one has cleared it away
        return
    finally:
        os.close(record)


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return


def _discard(partial: Path, target: Path) -> None:
    """Removes what did not become a folder, under another name: another process may be writing to it still."""
    if not partial.exists():  # as a rule: it has become ``target``
        return
    with suppress(OSError):
        partial = partial.rename(_aside(target, _REMOVED))
    shutil.rmtree(partial, ignore_errors=True)


def _put(partial: Path, target: Path) -> None:
    """Gives ``partial`` the name of ``target``; another writer may be putting one there at the same time."""
    replaced: list[Path] = []
    try:
        while not _renamed(partial, target):
            old = _aside(target, _REPLACED)
            with suppress(FileNotFoundError):  # the other writer was about to do the same
                target.rename(old)
                replaced.append(old)
    except OSError:
        for old in replaced[-1:]:
            _renamed(old, target)
        raise
    for old in replaced:
        shutil.rmtree(old, ignore_errors=True)


def _renamed(source: Path, target: Path) -> bool:
    """Renames a folder; False where one of that name is in the way."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _aside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}{suffix}")


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent) / name)
        sync(Path(parent))
