"""Processes end with what started them, however that ends: the kernel sees to it, so no thread has to get a turn.

    starter: holds the writing end of a pipe --.
                                                `--> reading end, open in each process that hangs on it
    starter ends, or cuts the line -> SIGKILL for all of them and their process groups, a DataLoader's processes too

Needs Python alone: programs in environments without torch load this very file. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from weakref import finalize

_F_SETSIG = 10


class Lifeline:
    """What other processes hang on. Whoever made it calls ``cut``; the end of this process does the same."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        finalize(self, os.close, self._reading)
        self._is_cut = False

    @property
    def path(self) -> str:
        """For ``hang_on``, in any process of the same user on this machine."""
        return f"/proc/{os.getpid()}/fd/{self._reading}"

    def cut(self) -> None:
        """Ends, at once, all processes that hang on it and what is left of their groups. Idempotent.

        The path goes on to name a line that is cut, for who comes too late.
        """
        if not self._is_cut:
            self._is_cut = True
            os.close(self._writing)


def hang_on(path: str) -> None:
    """Has this process killed when a ``Lifeline`` is cut, now if it has been; the first of a group with its group.

    Args:
        path: of the line.
    """
    try:
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # open from here to the end of this process
    except OSError:  # there is no such process any more, or not this pipe
        _kill()
    else:
        end_with_pipe(reading)


def end_with_pipe(reading_end: int) -> None:
    """Has this process killed when the last writing end of a pipe closes; the first of a group with its group.

    Processes that inherit the reading end keep the line whole when this one has ended before them.

    Args:
        reading_end: open to the end of this process. Nothing more is written to the pipe.
    """
    leads = os.getpgrp() == os.getpid()
    fcntl.fcntl(reading_end, fcntl.F_SETOWN, -os.getpid() if leads else os.getpid())
    fcntl.fcntl(reading_end, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reading_end, fcntl.F_SETFL, fcntl.fcntl(reading_end, fcntl.F_GETFL) | os.O_ASYNC)
    closed_before = select.poll()
    closed_before.register(reading_end, select.POLLHUP)
    if any(event & select.POLLHUP for _, event in closed_before.poll(0)):
        _kill()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
