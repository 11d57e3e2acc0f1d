"""The resident memory of this process, the memory still available to it, and glibc's settings for freed memory.

Replicas on a CPU share the process's memory, and taking too much is not an error there: the kernel kills the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

# mallopt's parameters in <malloc.h>, and their values: keep blocks of up to 1 GB, and up to 2 GB at the heap's top.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2_000_000_000), (_M_ARENA_MAX, 1))
_GIVING_BACK = ((_M_MMAP_THRESHOLD, 1 << 16), (_M_TRIM_THRESHOLD, 1 << 16))


def keep_freed_memory() -> bool:
    """Sets glibc to keep freed blocks for the next step, process-wide; False with another C library."""
    return _set(_SETTINGS)


def give_back_at_once() -> bool:
    """Undoes that, for a measurement: what is resident is then what is in use, at the price of a map for each block."""
    return _set(_GIVING_BACK)


def _set(settings: Sequence[tuple[int, int]]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def give_back_freed_memory() -> None:
    """Returns freed memory that glibc keeps to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


_BYTES_PER_MB = 2**20
_KB_PER_MB = 2**10
_SAMPLED_EVERY_S = 0.002
# The control group's limit, usage, and the line of memory.stat for file pages that it can reclaim.
_GROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def resident_mb() -> float:
    """MB (2**20 bytes) of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _BYTES_PER_MB


def available_mb(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """MB that this process can still take before the machine or its control group has none left, without swapping."""
    (free,) = (
        int(line.split()[1]) / _KB_PER_MB
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return max(0.0, min([free, *_group_headrooms(proc, groups)]))


class ResidentPeak:
    """Measures the peak resident memory inside a ``with`` block, in ``peak_mb``, by the kernel's high-water mark.

    Where that cannot be reset, a thread samples every two milliseconds.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> ResidentPeak:
        if not _reset_high_water_mark():
            self.peak_mb = resident_mb()
            self._sampler = threading.Thread(target=self._sample, name="lockstep-resident-memory", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._ended.set()
            self._sampler.join()
            self.peak_mb = max(self.peak_mb, resident_mb())
        else:
            status = Path("/proc/self/status").read_text().splitlines()
            (mark,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
            self.peak_mb = mark / _KB_PER_MB

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLED_EVERY_S):
            self.peak_mb = max(self.peak_mb, resident_mb())


def _reset_high_water_mark() -> bool:
    """Sets the process's high-water mark to what is resident now; False where that is not allowed."""
    try:
        control = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.write(control, b"5") > 0
    except OSError:
        return False
    finally:
        os.close(control)


def _group_headrooms(proc: Path, groups: Path) -> Iterator[float]:
    """The MB left in each control group above this process, of either version, that has a limit."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version, root = (1, groups / "memory") if controllers else (2, groups)
        # In a container the path may be the host's, which is not visible here: the root is the container's then.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield from _headroom(folder, *_GROUP_FILES[version])
            if folder == root:
                break


def _headroom(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[float]:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return
    if most != "max":
        yield (int(most) - used + int(stat.get(reclaimable, 0))) / _BYTES_PER_MB
