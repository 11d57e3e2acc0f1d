"""How a command fails: one line on stderr and an exit code, never a traceback that nobody asked for."""

from __future__ import annotations

import os
import sys
import traceback as tracebacks
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from lockstep.errors import ConfigError, DataError, LockstepError, MissingExtraError

ASKED_WRONGLY, FAILED, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is said about an error, on one line, and the exit code of the process."""

    line: str
    exit_code: int


def explain(error: BaseException) -> Failure:
    """The one line and the exit code for an error. Pure.

    What was asked wrongly (settings, devices, data, a missing package) is 2; what failed while running is 1.
    """
    if isinstance(error, KeyboardInterrupt):
        return Failure(line="lockstep: interrupted", exit_code=INTERRUPTED)
    if isinstance(error, ConfigError | DataError | MissingExtraError):
        return _failure(str(error), error, ASKED_WRONGLY)
    if isinstance(error, LockstepError | OSError):
        return _failure(str(error), error, FAILED)
    return _failure(f"{type(error).__name__}: {error}; run again with --traceback to see where", error, FAILED)


def report_failure(error: BaseException, *, traceback: bool) -> int:
    """Prints the one line for ``error``, after its traceback if that was asked for; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        return _reader_is_gone()
    failure = explain(error)
    with suppress(OSError):  # where nobody reads standard error either, the exit code still says it
        if traceback:
            tracebacks.print_exception(error)
        print(failure.line, file=sys.stderr, flush=True)
    let_go_of_streams()
    return failure.exit_code


def print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Stands in for ``warnings.showwarning``: one line, in place of two with a place in our source."""
    print(f"lockstep: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _failure(message: str, error: BaseException, exit_code: int) -> Failure:
    text = " ".join([message, *(f"({note})" for note in getattr(error, "__notes__", ()))])
    return Failure(line=f"lockstep: error: {' '.join(text.split())}", exit_code=exit_code)


def let_go_of_streams() -> None:
    """Drops what standard output or error cannot take any more.

    Python would complain of it when it flushes them at its end, and end with 120 in place of the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _reader_is_gone() -> int:
    """``lockstep data mlm | head -1``: nobody reads on."""
    let_go_of_streams()
    return FAILED
