"""Where the workers stood when their time was up: each writes down its stacks shortly before, from outside Python.

A deadlock is told by what every worker was waiting for, and when the launcher has ended them nobody can ask any more.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BEFORE = 0.1  # of the time that is left
_BEFORE_S = 2.0  # and no more: eight workers on two cores take one second to write


@contextmanager
def stacks_noted(path: Path, until: float | None) -> Iterator[None]:
    """While inside: writes what all threads of this process are doing to ``path`` when it is nearly ``until``.

    Args:
        path: the file.
        until: on the clock of ``time.monotonic``, which all processes of a host share; None writes nothing.
    """
    if until is None:
        yield
        return
    left_s = max(0.0, until - time.monotonic())
    with path.open("w") as file:
        faulthandler.dump_traceback_later(max(0.01, left_s - min(_BEFORE_S, _BEFORE * left_s)), file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def read_stacks(paths: dict[int, Path]) -> str:
    """What the workers wrote, each under its number; empty where none did.

    Args:
        paths: the files, by worker.
    """
    written = {worker: path.read_text().strip() for worker, path in paths.items() if path.exists()}
    return "\n\n".join(f"worker {worker} stood here:\n{stacks}" for worker, stacks in written.items() if stacks)
