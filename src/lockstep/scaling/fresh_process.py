"""Calls a function in a fresh process with a time limit. Its threads, memory and part of a GPU end with it."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from lockstep import errors
from lockstep.errors import LockstepError, ReplicaError
from lockstep.parent_death import die_with_parent

T = TypeVar("T")
_EXIT_LIMIT_S = 15.0


def call_in_fresh_process(function: Callable[[], T], *, limit_s: float, name: str) -> T:
    """Returns what ``function`` returns, once its process has ended. The warnings that it issues are issued here.

    Args:
        function: is pickled, as its result is.
        limit_s: seconds after which the process is ended.
        name: what messages call the measurement.

    Raises:
        LockstepError: the function raised it.
        ReplicaError: the function raised another error, or its process died or took longer than ``limit_s``.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, far), daemon=False)
    with closing(near):
        try:
            with _interrupts_held():
                process.start()
            far.close()
            result, caught, error = _receive(near, limit_s, name)
        except BaseException:
            if process.pid is not None:
                process.terminate()
                _end(process)
            raise
        _end(process)
    for message in caught:
        warnings.warn(message, stacklevel=2)
    if error is not None:
        raise _error(*error, name)
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], object], connection: Connection) -> None:
    """In the fresh process: sends the result, the warnings, and the class and the message of an error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that what is open is closed
    die_with_parent()
    result, error = None, None
    with closing(connection), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001 - the process that asked raises it
            notes = [f"({note})" for note in getattr(raised, "__notes__", ())]
            error = type(raised).__name__, " ".join([str(raised), *notes])
        connection.send((result, [str(warning.message) for warning in caught], error))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Holds SIGINT back until the end of the block; a process started in it never gets one: its parent ends it."""
    resource_tracker.ensure_running()  # started inside the block, it would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(connection: Connection, limit_s: float, name: str) -> tuple[Any, list[str], tuple[str, str] | None]:
    if not connection.poll(limit_s):
        raise ReplicaError(f"{name!r} was not done after {limit_s:.0f} s; give it fewer --steps or a smaller model")
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise ReplicaError(
            f"the process that measured {name!r} ended early, as it does when memory is short; lower --batch-size"
        ) from None


def _end(process: SpawnProcess) -> None:
    """Waits for a process to end, and kills it after ``_EXIT_LIMIT_S``."""
    process.join(_EXIT_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _error(kind: str, message: str, name: str) -> LockstepError:
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, LockstepError):
        return known(f"{message} (while measuring {name!r})")
    return ReplicaError(f"measuring {name!r} failed with {kind}: {message}")
