"""The hang dump: each worker writes down the stacks of its threads shortly before its time is up.

A deadlock shows in what every worker was waiting for. Once the launcher has ended the workers, nobody can ask them any
more. This module imports no torch, as ``worker`` does not.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_DUMP_SHARE = 0.1  # of the time that is left
_DUMP_LONGEST_S = 2.0  # eight workers on two cores take one second to write their stacks


@contextmanager
def dump_stacks_near(deadline: float | None, path: Path) -> Iterator[None]:
    """While inside: shortly before the deadline, writes what all threads of this process are doing to ``path``.

    The deadline is on the clock of ``time.monotonic``, which all processes of a host share; None writes nothing.
    """
    if deadline is None:
        yield
        return
    left_s = max(0.0, deadline - time.monotonic())
    with path.open("w") as file:
        # faulthandler's thread is in C and takes no GIL: it writes although all Python threads hang in native code.
        faulthandler.dump_traceback_later(max(0.01, left_s - min(_DUMP_LONGEST_S, _DUMP_SHARE * left_s)), file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def read_stacks(paths: Mapping[int, Path]) -> str:
    """What ``dump_stacks_near`` wrote in each worker, under the worker's rank; empty if none did."""
    written = {worker: path.read_text().strip() for worker, path in paths.items() if path.exists()}
    return "\n\n".join(f"worker {worker} stood here:\n{stacks}" for worker, stacks in written.items() if stacks)
