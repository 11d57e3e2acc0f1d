"""A guard that kills processes when the process that made it ends, however that ends. Linux only.

    maker: holds the writing end of a pipe --.
                                              `--> reading end, open in each guarded process
    the maker ends or calls kill() -> SIGKILL for all of them and their process groups, a DataLoader's processes too

The kernel sends the signal, so no thread has to run for it. This module needs only Python: programs in environments
without torch load this file by its path.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
from weakref import finalize


class ParentDeathGuard:
    """Kills the processes that call ``die_with(path)`` when ``kill`` is called or this process ends."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        finalize(self, os.close, self._reading)
        self._killed = False

    @property
    def path(self) -> str:
        """The argument of ``die_with``, in any process of the same user on this machine."""
        return f"/proc/{os.getpid()}/fd/{self._reading}"

    def kill(self) -> None:
        """Kills all guarded processes and what is left of their groups, also any that come later. Idempotent."""
        if not self._killed:
            self._killed = True
            os.close(self._writing)


def die_with(path: str) -> None:
    """Has this process, a group leader with its group, killed with the maker of the guard, or now if it is gone."""
    try:
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # open from here to the end of this process
    except OSError:  # the process or the pipe no longer exists
        _kill_self()
    else:
        die_with_pipe(reading)


def die_with_parent() -> None:
    """Makes a child of ``multiprocessing`` a group leader, and has it and its group killed with its parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A group of its own, so that the signal reaches what this process starts as well; the parent's group is left
        # alone.
        os.setsid()
        die_with_pipe(parent.sentinel)


def die_with_pipe(reading_end: int) -> None:
    """Has this process killed when the last writing end of a pipe closes; a group leader with its group.

    Processes that inherit the reading end, which stays open to the end, stay guarded when this one has ended before
    them. Nothing more is written to the pipe.
    """
    leads = os.getpgrp() == os.getpid()
    fcntl.fcntl(reading_end, fcntl.F_SETOWN, -os.getpid() if leads else os.getpid())
    fcntl.fcntl(reading_end, fcntl.F_SETSIG, signal.SIGKILL)
    # The kernel signals the owner when a pipe that is watched so becomes readable, and a pipe whose last writer has
    # gone does (fcntl(2), O_ASYNC).
    fcntl.fcntl(reading_end, fcntl.F_SETFL, fcntl.fcntl(reading_end, fcntl.F_GETFL) | os.O_ASYNC)
    # The signal comes for what happens from now on: a maker that ended before is found by looking.
    closed_before = select.poll()
    closed_before.register(reading_end, select.POLLHUP)
    if any(event & select.POLLHUP for _, event in closed_before.poll(0)):
        _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
