"""The command ``lockstep``: it parses, calls one function, and prints.

Errors end in one line on stderr: exit code 2 for what was asked wrongly, 1 for a failure while running, 130 for Ctrl-C.
No other room imports this one.
"""

from __future__ import annotations

import atexit
import gc
import sys
import warnings
from collections.abc import Sequence

from lockstep.cli.failure import INTERRUPTED, print_warning, report_failure
from lockstep.cli.in_workers import InWorkers


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: the words after ``lockstep``; None takes those of this process.

    Example:
        >>> from lockstep.cli import main
        >>> main(["devices", "--devices", "cpu"])  # doctest: +SKIP
        0
    """
    atexit.unregister(gc.freeze)  # tests call this function often
    atexit.register(gc.freeze)  # else Python looks for cycles in all that was imported before it ends: 1.5 s of a core
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    traceback = "--traceback" in words
    try:
        done = run_words(words)
        return done.run(run_words, words) if isinstance(done, InWorkers) else done
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost frame: whatever happens is one line
        if isinstance(error, KeyboardInterrupt) and _has_launcher():
            return INTERRUPTED  # which it says, once for all workers
        return report_failure(error, traceback=traceback)


def run_words(words: Sequence[str]) -> int | InWorkers:
    """Runs one command to its end, or says in how many workers it is to be run; what fails is raised."""
    from lockstep.cli.app import parse

    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        job = parse([word for word in words if word != "--traceback"])
        if job == INTERRUPTED:  # Ctrl-C while parsing, which typer turns into a number
            raise KeyboardInterrupt
        return job if isinstance(job, int) else job()


def _has_launcher() -> bool:
    """Whether this is a worker of ``lockstep run`` or torchrun."""
    from lockstep.cluster.resolve import cluster_from_environment

    cluster = cluster_from_environment()
    return cluster is not None and cluster.store_is_served
