"""glibc's settings for freed memory."""

from __future__ import annotations

import ctypes
import platform

# mallopt's parameters in <malloc.h>, and their values: keep blocks of up to 1 GB, and up to 2 GB at the heap's top.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2_000_000_000), (_M_ARENA_MAX, 1))


def keep_freed_memory() -> bool:
    """Sets glibc to keep freed blocks for the next step, process-wide; False with another C library."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in _SETTINGS)
