"""Files and folders that appear whole or not at all, even when their writer is killed at any moment.

    .NAME.<random>.partial -> fsync -> rename to NAME -> fsync of the parent folder

The writer holds a lock on its partial file (of a folder: on the record file) until it is done or dead. So the next
writer can tell what a living process is writing from what a dead one left, and removes the latter. Nobody waits for the
lock; on a file system without locks nothing is removed. When a folder is replaced, the old one is called
``.NAME.<random>.replaced`` between the two renames; whoever finds it without a successor puts it back.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields the path of an empty file to write to. It becomes ``path`` when the block ends. The parent folder is made.

    Raises OSError if the file cannot be written. Then nothing is left behind, as after any error in the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_files(path)
    partial, descriptor = _create_locked(path)
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    finally:
        os.close(descriptor)
        # It is still there only after an error: the rename has taken it away otherwise.
        partial.unlink(missing_ok=True)


def atomic_write(path: Path, text: str) -> Path:
    """Writes ``text`` to ``path`` as UTF-8 like ``atomic_file``, replaces what is there, and returns ``path``.

    Names of files in the text that are not UTF-8, as Python reads them, are written with their own bytes.
    """
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    return path


@contextmanager
def atomic_folder(target: Path, *, record: str) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Yields a folder to fill and a function that writes its record file. It becomes ``target`` when the block ends.

    An existing folder is replaced. ``record`` is the name of the file that every such folder has; it carries the
    writer's lock. Errors are as in ``atomic_file``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, descriptor = _create_locked(target, record)
    try:

        def write_record(text: str) -> None:
            # A copy of the descriptor: closing the one that holds the lock would end the lock.
            with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
                file.write(text)

        yield partial, write_record
        for folder, _, files in os.walk(partial):
            for name in ("", *files):  # "" is the folder itself
                _sync(Path(folder) / name)
        _move_into_place(partial, target)
        _sync(target.parent)
    finally:
        os.close(descriptor)
        _discard(partial, target)


def remove_folder(path: Path) -> None:
    """Removes a folder: first its name, in one step, then its files."""
    removed = _aside(path, _REMOVED)
    path.rename(removed)
    # A reader sees the folder whole or not at all, whichever file is removed first; what fails here is cleared by
    # ``remove_leftovers``.
    shutil.rmtree(removed, ignore_errors=True)


def remove_leftovers(parent: Path, *, record: str) -> None:
    """Removes from ``parent`` what killed writers left there, and puts back replaced folders without a successor."""
    for path in parent.glob(f".*{_REPLACED}"):
        target = parent / original_name(path)
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)
    for path in parent.glob(f".*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f".*{_PARTIAL}"):
        _remove_dead_folder(path, record)


def replaced_folders(parent: Path) -> list[Path]:
    """The whole folders whose writer was killed just before it gave their name to a newer one."""
    return sorted(path for path in parent.glob(f".*{_REPLACED}") if not (parent / original_name(path)).exists())


def original_name(aside: Path) -> str:
    """``step-1`` for ``.step-1.0123456789ab.replaced``."""
    return aside.name[1:].rsplit(".", 2)[0]


def _lock_new(descriptor: int) -> bool:
    """Locks a new file for as long as ``descriptor`` is open.

    Returns False if another process took it for a dead writer's file before it was locked: make another one.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return True
    # test_a_file_that_is_taken_for_a_dead_writer_s_before_it_is_locked_is_made_again: between ``open`` and the lock
    # another process may have removed the name.
    return os.fstat(descriptor).st_nlink > 0


def _writer_is_dead(descriptor: int) -> bool:
    """Whether nobody holds the file's lock. If so, the caller holds it as long as ``descriptor`` is open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _create_locked(target: Path, record: str = "") -> tuple[Path, int]:
    """A new partial file, or a folder with a record file, and the open descriptor that holds its lock."""
    while True:
        partial = _aside(target, _PARTIAL)
        if record:
            partial.mkdir()
        try:
            descriptor = os.open(partial / record, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            if record and isinstance(error, FileNotFoundError):
                continue  # another process removed the folder before it had a lock
            if record:
                partial.rmdir()
            raise
        if _lock_new(descriptor):
            return partial, descriptor
        os.close(descriptor)


def _remove_dead_files(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}"):
        with suppress(OSError), leftover.open("rb") as opened:  # no permission, or another process has removed it
            if _writer_is_dead(opened.fileno()):
                leftover.unlink()


def _remove_dead_folder(path: Path, record: str) -> None:
    try:
        descriptor = os.open(path / record, os.O_RDWR)
    except FileNotFoundError:  # the writer has made the folder and not its record: it was killed, or it is about to
        with suppress(OSError):
            path.rmdir()
        return
    except OSError:  # no permission
        return
    try:
        if _writer_is_dead(descriptor):
            # Renamed first: a process that is killed while it removes the files may have removed the record already.
            shutil.rmtree(path.rename(_aside(path.with_name(original_name(path)), _REMOVED)), ignore_errors=True)
    except FileNotFoundError:  # another process has removed it
        return
    finally:
        os.close(descriptor)


def _discard(partial: Path, target: Path) -> None:
    """Removes a folder that did not become ``target``, renamed first: another process may still be writing to it."""
    if not partial.exists():  # the usual case: it has become ``target``
        return
    with suppress(OSError):
        partial = partial.rename(_aside(target, _REMOVED))
    shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(partial: Path, target: Path) -> None:
    """Renames ``partial`` to ``target``. Another writer may be moving a folder there at the same time."""
    replaced: list[Path] = []
    try:
        # ``rename`` of a folder replaces an empty one only, so the old folder is moved aside first (rename(2):
        # ENOTEMPTY).
        while not _renamed(partial, target):
            old = _aside(target, _REPLACED)
            with suppress(FileNotFoundError):  # the other writer has just moved the old one aside
                target.rename(old)
                replaced.append(old)
    except OSError:
        # test_where_the_last_rename_fails_the_old_one_is_put_back.
        for old in replaced[-1:]:
            _renamed(old, target)
        raise
    for old in replaced:
        shutil.rmtree(old, ignore_errors=True)


def _renamed(source: Path, target: Path) -> bool:
    """Renames a folder; False if a folder of that name is in the way."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _aside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}{suffix}")


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    # A rename is on the disk only when its folder is (fsync(2)), and Python has no fsync by path.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
