"""The resident memory of this process, and how much more the host would give it, as Linux accounts for both.

Replicas on a CPU share the process's memory, and what takes too much there does not end in an error: the kernel kills
the process. So whoever must not go too far measures here first.
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
    """Tells glibc to keep freed blocks for the next step; process-wide, and until ``give_back_at_once``.

    Returns:
        Whether it was done: False with another C library, whose allocator is left alone.
    """
    return _set(_SETTINGS)


def give_back_at_once() -> bool:
    """Undoes that, for a measurement: what is resident is then what is in use, at the price of a map for each block.

    Returns:
        Whether it was done.
    """
    return _set(_GIVING_BACK)


def _set(settings: Sequence[tuple[int, int]]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def give_back_freed_memory() -> None:
    """Gives what has been freed, and is kept for the next step, back to the system; with another C library, nothing."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


_BYTES_PER_MB = 2**20
_KB_PER_MB = 2**10
_SAMPLED_EVERY_S = 0.002
# The control group's limit, usage, and the line of memory.stat for file pages that it gives up when it needs room.
_GROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def resident_mb() -> float:
    """MB (2**20 bytes) of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _BYTES_PER_MB


def available_mb(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """MB that this process can take more before the machine or its control group has none left, without swapping."""
    (free,) = (
        int(line.split()[1]) / _KB_PER_MB
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return max(0.0, min([free, *_rooms(proc, groups)]))


class ResidentPeak:
    """Measures the most memory that this process has resident inside a ``with`` block: ``peak_mb``, afterwards.

    The kernel's own high-water mark is used, which misses nothing. Where it may not be set back, a thread looks every
    two milliseconds.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._sampler: _Sampler | None = None

    def __enter__(self) -> ResidentPeak:
        if not _forget_high_water_mark():
            self._sampler = _Sampler()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self.peak_mb = self._sampler.end()
        else:
            status = Path("/proc/self/status").read_text().splitlines()
            (mark,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
            self.peak_mb = mark / _KB_PER_MB


class _Sampler:
    """A thread that looks at the resident memory until it is ended."""

    def __init__(self) -> None:
        self._peak_mb = resident_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lockstep-resident-memory", daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return max(self._peak_mb, resident_mb())

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLED_EVERY_S):
            self._peak_mb = max(self._peak_mb, resident_mb())


def _forget_high_water_mark() -> bool:
    """Sets the process's high-water mark to what is resident now; False where that is not allowed."""
    try:
        control = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(control, b"5")
    except OSError:
        return False
    finally:
        os.close(control)
    return True


def _rooms(proc: Path, groups: Path) -> Iterator[float]:
    """What every control group above this process, of either version, has left; none for groups without a limit."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version, root = (1, groups / "memory") if controllers else (2, groups)
        # In a container the path may be the host's, which is not to be seen here: the root is the container's then.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield from _room(folder, *_GROUP_FILES[version])
            if folder == root:
                break


def _room(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[float]:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return
    if most != "max":
        yield (int(most) - used + int(stat.get(reclaimable, 0))) / _BYTES_PER_MB
