"""Files that appear whole or not at all: written aside in the same folder, synced, renamed.

A reader, also one in another process, sees the old file or the new one, and never a part of it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path to write to, which becomes ``path`` when the block ends; the folder is made.

    Raises:
        OSError: it cannot be written; then nothing is left behind, as after any error in the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
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
