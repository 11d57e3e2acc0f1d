"""The resident memory of this process, its peak, and freed memory that glibc keeps. Linux with glibc."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt, in <malloc.h>
_BYTES_PER_MB = 2**20
_KB_PER_MB = 2**10


def give_back_at_once() -> None:
    """Undoes ``keep_freed_memory``: what is resident is then what is in use, at the price of a map for each block."""
    for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(parameter, 1 << 16)


def give_back_freed_memory() -> None:
    """Returns freed memory that glibc keeps to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def resident_mb() -> float:
    """MB (2**20 bytes) of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _BYTES_PER_MB


class ResidentPeak:
    """Measures the peak resident memory inside a ``with`` block, in ``peak_mb``, by the kernel's high-water mark."""

    def __init__(self) -> None:
        self.peak_mb = 0.0

    def __enter__(self) -> ResidentPeak:
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        status = Path("/proc/self/status").read_text().splitlines()
        (mark,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        self.peak_mb = mark / _KB_PER_MB
