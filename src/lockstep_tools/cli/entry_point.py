"""Runs one command. An error ends in one line on stderr and an exit code; a traceback appears only on request.

Exit codes: 2 for wrong arguments, 1 for a failure while running, 130 for Ctrl-C. A command that divides a model among
workers but was started without any runs again in workers of its own:

    lockstep train mlm --pipeline 2 --tensor 2        one process parses the arguments, and starts
        worker 0 ... worker 3                         which run with the same arguments, as under lockstep run
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback as tracebacks
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lockstep.console import fill_error
from lockstep.errors import ClusterError, ConfigError, DataError, LockstepError, MissingExtraError
from lockstep_tools.cli.in_workers import InWorkers

INTERRUPTED = 130
_OBJECTS_PER_COLLECTION = 10_000
"""After how many new objects Python's garbage collector runs. By default it runs after 700, and that takes a quarter of
the time to the first step of ``lockstep train``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: the arguments after ``lockstep``; None takes those of this process.

    Example:
        >>> from lockstep_tools.cli import main
        >>> main(["devices", "--devices", "cpu"])  # doctest: +SKIP
        0
    """
    _open_standard_streams()
    # Without this, Python looks for reference cycles in all imported modules before it exits: 1.5 s of a core.
    atexit.unregister(gc.freeze)  # tests call this function often
    atexit.register(gc.freeze)
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        result = run_command(arguments)
        return result.run(run_command, arguments) if isinstance(result, InWorkers) else result
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost frame
        if isinstance(error, KeyboardInterrupt) and _has_launcher():
            return INTERRUPTED  # the launcher prints it, once for all workers
        return report_failure(error, traceback="--traceback" in arguments)


def run_command(arguments: Sequence[str]) -> int | InWorkers:
    """Runs one command and returns its exit code, or in how many workers it is to run instead."""
    from lockstep_tools.cli.app import parse

    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    with warnings.catch_warnings():
        warnings.showwarning = print_warning  # type: ignore[assignment]
        job = parse([argument for argument in arguments if argument != "--traceback"])
        if job == INTERRUPTED:  # typer turns a Ctrl-C while it parses into a number
            raise KeyboardInterrupt
        return job if isinstance(job, int) else job()


def failure_line(error: BaseException) -> tuple[str, int]:
    """The one line and the exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return "; ".join(["lockstep: interrupted", *getattr(error, "__notes__", ())]), INTERRUPTED
    message, exit_code = str(error), 1
    if isinstance(error, ConfigError | DataError | MissingExtraError):
        exit_code = 2
    elif isinstance(error, ClusterError) and not _has_launcher():
        exit_code = error.exit_code
    elif not isinstance(error, LockstepError | OSError):
        message = f"{type(error).__name__}: {error}; run again with --traceback to see where"
    text = " ".join([message, *(f"({note})" for note in getattr(error, "__notes__", ()))])
    return f"lockstep: error: {' '.join(text.split())}", exit_code


def report_failure(error: BaseException, *, traceback: bool) -> int:
    """Prints the line for ``error``, after its traceback if ``traceback``; returns the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader has left, as in ``lockstep devices | head -1``
        discard_broken_streams()
        return 1
    line, exit_code = failure_line(error)
    with suppress(OSError):  # if nobody reads standard error either, the exit code still tells
        if traceback:
            tracebacks.print_exception(error)
        print(fill_error(line), file=sys.stderr, flush=True)
    discard_broken_streams()
    return exit_code


def print_warning(message: Warning | str, *_: Any) -> None:
    """Replaces ``warnings.showwarning``: prints one line, without a place in our source."""
    line = f"lockstep: warning: {' '.join(str(message).split())}"
    print(fill_error(line), file=sys.stderr, flush=True)


def discard_broken_streams() -> None:
    """Redirects standard output and error to nowhere if they cannot be written to.

    Otherwise Python complains when it flushes them at exit, and exits with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            # The stream keeps its buffer: what is left in it now goes to nowhere instead of failing again at exit.
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _open_standard_streams() -> None:
    """Opens standard input, output and error to nowhere where they are closed.

    Else the next files and sockets of this process would have their numbers, and libraries in C write there.
    """
    # ``open`` gives the lowest free number, so the loop fills 0 to 2 and stops at the first one above:
    # test_no_file_of_ours_takes_the_number_of_a_closed_stream.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _has_launcher() -> bool:
    """Whether this process is a worker of ``lockstep run`` or torchrun."""
    from lockstep.cluster.environment import cluster_from_environment

    cluster = cluster_from_environment()
    return cluster is not None and cluster.store_is_served
