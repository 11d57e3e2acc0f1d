"""A function in a fresh process, with a time limit: what looks at the device must not stay there while others run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from lockstep.errors import ReplicaError
from lockstep.parent_death import ParentDeathGuard, die_with

T = TypeVar("T")


def apart(function: Callable[[], T], *, limit_s: float) -> T:
    """What ``function`` returns in a process of its own, which is gone then.

    Args:
        function: travels by its name, its result by pickle.
        limit_s: after so long it is given up.

    Raises:
        ReplicaError: it raised, ended or took too long.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    guard = ParentDeathGuard()
    process = context.Process(target=_answer, args=(function, guard.path, far), daemon=True)
    process.start()
    far.close()
    try:
        if not near.poll(limit_s):
            raise ReplicaError(f"no answer within {limit_s:.0f} s; free the device, or raise --budget-s")
        result, reason = near.recv()
    except EOFError:
        raise ReplicaError("the process that looks at the device ended without an answer") from None
    finally:
        guard.kill()  # with whatever it has started
        process.kill()  # one that had not reached die_with yet
        process.join()
        process.close()
        near.close()
    if reason:
        raise ReplicaError(reason)
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], object], guard: str, connection: Connection) -> None:
    os.setsid()
    die_with(guard)
    try:
        connection.send((function(), ""))
    except Exception as error:
        connection.send((None, f"{type(error).__name__}: {error}".split("\n")[0]))
        raise
