"""The OpenMP team of the thread that calls ``run``, ended before a run so that the replicas' teams stay awake.

A large operation makes a team of threads, which stays and waits. Where there are more threads than processors, idle
ones included, libgomp's waiting threads sleep and must be woken every time: a step of the recipe ``reviews`` on two
cores took 95 ms with the main thread's team beside the replica's, and 73 without. No result changes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable

from lockstep._torch_compat import library_path

_SOFT = 1  # omp_pause_soft in <omp.h>


def end_openmp_team() -> None:
    """Ends the OpenMP team of the calling thread; its next large operation makes another. Needs libgomp."""
    # Soft: the team ends, and what it was set to stays. The thread slept and was woken 439 times in a step of the
    # recipe ``reviews`` with its team beside the replica's, 22 times without.
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def end_teams_before_forks() -> None:
    """Ends a thread's team whenever it forks: libgomp would wait forever for its threads, which fork does not copy."""
    os.register_at_fork(before=end_openmp_team)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Libgomp's ``omp_pause_resource_all``, which affects the calling thread alone; that of others affects all."""
    if not sys.platform.startswith("linux"):
        return None
    openmp = ctypes.CDLL(library_path())  # with what it is linked to
    # LLVM's and Intel's have the function too, and pause the teams of all threads with it.
    if hasattr(openmp, "kmp_get_blocktime"):
        return None
    return getattr(openmp, "omp_pause_resource_all", None)  # since GCC 9
