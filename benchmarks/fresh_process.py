"""Calls a function in a fresh process with a time limit: what it takes of memory or of a GPU is gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from lockstep.errors import ReplicaError
from lockstep.parent_death import ParentDeathGuard, die_with

T = TypeVar("T")
_END_LIMIT_S = 30.0


def in_fresh_process(function: Callable[[], T], *, limit_s: float, name: str = "the device's measurement") -> T:
    """Returns what ``function`` returns in a fresh process, once that process has ended.

    Args:
        function: is pickled, as is its result.
        limit_s: the process is killed after this time.
        name: what the error messages call it.

    Raises:
        ReplicaError: the function raised, or the process ended too early or took too long.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    lifeline = ParentDeathGuard()
    process = context.Process(target=_answer, args=(function, lifeline.path, far), daemon=True)
    process.start()
    far.close()
    try:
        if not near.poll(limit_s):
            raise ReplicaError(f"{name}: no answer within {limit_s:.0f} s; give it fewer --steps or more time")
        result, reason = near.recv()
        process.join(_END_LIMIT_S)
    except EOFError:
        raise ReplicaError(f"{name}: its process ended without an answer") from None
    finally:
        lifeline.kill()  # with whatever it has started
        process.kill()  # one that had not come to hang on it yet
        process.join()
        process.close()
        near.close()
    if reason:
        raise ReplicaError(reason)
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], object], lifeline: str, connection: Connection) -> None:
    os.setsid()
    die_with(lifeline)
    try:
        connection.send((function(), ""))
    except Exception as error:
        connection.send((None, f"{type(error).__name__}: {error}".split("\n")[0]))
        raise
