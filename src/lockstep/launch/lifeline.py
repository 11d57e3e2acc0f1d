"""Workers end with what started them, however that ends: the kernel sees to it, so no thread has to get a turn."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10


def end_with_parent(parent: int) -> None:
    """Has this process killed when its parent ends.

    Args:
        parent: the process id of the parent; one that is no longer the parent has ended already.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_pipe(reading_end: int) -> None:
    """Has this process killed when the last writing end of a pipe closes: for a parent that is none to the kernel.

    A process that was forked by multiprocessing's server has the server for its parent, which outlives the program
    that asked for it. The pipe is the program's, and nothing more is written to it.
    """
    fcntl.fcntl(reading_end, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reading_end, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reading_end, fcntl.F_SETFL, fcntl.fcntl(reading_end, fcntl.F_GETFL) | os.O_ASYNC)
