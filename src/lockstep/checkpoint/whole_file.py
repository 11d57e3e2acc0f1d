"""Files that appear whole or not at all: written aside in the same folder, synced, renamed.

A reader, also one in another process, sees the old file or the new one, and never a part of it. What a writer that was
killed has left aside, the next one that writes the same file clears away.
"""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.checkpoint.writer_lock import hold, writer_is_dead


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path to write to, an empty file that becomes ``path`` when the block ends; the folder is made.

    Raises:
        OSError: it cannot be written; then nothing is left behind, as after any error in the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    partial, held = _begin(path)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        os.close(held)
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Writes ``text`` to ``path`` as UTF-8, replacing what is there, and returns ``path``.

    Raises:
        OSError: it cannot be written; then nothing is left behind.
    """
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")
    return path


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _begin(path: Path) -> tuple[Path, int]:
    """A fresh file aside, and what holds its lock."""
    while True:
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
        held = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if hold(held):
            return partial, held
        os.close(held)


def _clear_leftovers(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(OSError), left.open("rb") as opened:  # not ours to clear; another one has cleared it away
            if writer_is_dead(opened.fileno()):
                left.unlink()
