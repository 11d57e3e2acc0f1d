"""Small text files that appear whole or not at all: written aside, synced, renamed.

A reader, also one in another process, sees the old file or the new one. Weights have their own writer (``weights``).
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes ``text`` to ``path`` as UTF-8, replacing what is there; the folder is made.

    Raises:
        OSError: it cannot be written; then nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
