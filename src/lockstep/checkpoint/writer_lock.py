"""The lock that tells what is being written from what a dead writer has left: it ends with its process.

Nobody waits for it. On a file system without locks everything can be written, and nothing is cleared away.
"""

from __future__ import annotations

import fcntl
import os


def hold(descriptor: int) -> bool:
    """Locks a new file for as long as ``descriptor`` is open.

    Returns:
        False where somebody has taken it for a dead writer's before it was locked: make another one.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return os.fstat(descriptor).st_nlink > 0


def writer_is_dead(descriptor: int) -> bool:
    """Whether nobody holds the file's lock; the caller then does, for as long as ``descriptor`` is open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
