"""What the system allows: open files, shared memory, memory, cores and threads, space on disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.replicas.cpu.memory import available_mb, control_groups
from lockstep_tools.doctor.section import Fact, Section, Trouble

GB = 2**30
# 1,024 is the soft limit on most systems; a DataLoader's tensors and workers' connections exceed it.
_FEW_FILES = 4096
_LITTLE_SHARED = GB
_LITTLE_DISK = 2 * GB
_LITTLE_MEMORY_MB = 2048


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What was read. Sizes are bytes unless they say otherwise.

    Args:
        cores: cores of the machine.
        usable_cores: those that this process may use.
        cpu_quota: cores' worth of time that the control group has; None without a quota.
        omp_threads: the value of OMP_NUM_THREADS; empty if it is not set.
        load: load average of the last minute.
        memory: of the machine.
        available_mb: what this process can take, in MB.
        memory_limit: of the control group; None without one.
        open_files: the soft and the hard limit; -1 for none.
        shared: total and free bytes of /dev/shm; None if there is none.
        disk: free bytes where the command runs, and where temporary files go.
    """

    cores: int
    usable_cores: int
    cpu_quota: float | None
    omp_threads: str
    load: float
    memory: int
    available_mb: float
    memory_limit: int | None
    open_files: tuple[int, int]
    shared: tuple[int, int] | None
    disk: tuple[int, int]

    def facts(self) -> list[Fact]:
        """All of them, for a person to read."""
        soft, hard = ("unlimited" if number < 0 else f"{number:,}" for number in self.open_files)
        quota = "no quota" if self.cpu_quota is None else f"a quota of {self.cpu_quota:g}"
        memory_limit = "no limit" if self.memory_limit is None else f"a limit of {self.memory_limit / GB:.1f} GB"
        available = f"{self.memory / GB:.1f} GB, {self.available_mb / 1024:.1f} GB available"
        shared = "none" if self.shared is None else f"{self.shared[0] / GB:.1f} GB, {self.shared[1] / GB:.1f} GB free"
        working_folder, temporary = (f"{free / GB:.1f} GB" for free in self.disk)
        return [
            Fact("cores", f"{self.cores}, {self.usable_cores} for this process, {quota} (control group)"),
            Fact("OMP_NUM_THREADS", self.omp_threads or "not set"),
            Fact("load average", f"{self.load:.2f}"),
            Fact("memory", f"{available}, {memory_limit} (control group)"),
            Fact("shared memory", shared),
            Fact("open files", f"{soft}, at most {hard}"),
            Fact("disk", f"{working_folder} free in this folder, {temporary} for temporary files"),
        ]

    def troubles(self) -> Iterator[Trouble]:
        """The known troubles. Pure."""
        yield from self._core_troubles()
        if 0 <= self.open_files[0] < _FEW_FILES:
            yield Trouble(
                f"A process may open {self.open_files[0]:,} files only. Processes of a DataLoader share tensors by open"
                " files, and `Too many open files` ends a run. Run `ulimit -n 65536` first."
            )
        if self.shared is None or self.shared[0] < _LITTLE_SHARED:
            size = "missing" if self.shared is None else f"{self.shared[0] / 2**20:,.0f} MB"
            yield Trouble(
                f"Shared memory (/dev/shm) is {size}. Processes of a DataLoader pass batches through it, and a run "
                "ends with `Bus error` when it is full. Start the container with --shm-size=8g or --ipc=host."
            )
        if self.available_mb < _LITTLE_MEMORY_MB:
            yield Trouble(
                f"This process can take {self.available_mb:,.0f} MB of memory before the system kills it. End other "
                "programs, or raise the limit of the container."
            )
        if min(self.disk) < _LITTLE_DISK:
            yield Trouble(
                f"Free space: {self.disk[0] / GB:.1f} GB in this folder, {self.disk[1] / GB:.1f} GB for temporary "
                "files. Checkpoints and logs need more; choose another --output, or set TMPDIR."
            )

    def _core_troubles(self) -> Iterator[Trouble]:
        usable = min(self.usable_cores, self.cpu_quota or self.usable_cores)
        threads = int(self.omp_threads) if self.omp_threads.isdecimal() else None
        if threads is None and usable < self.usable_cores:
            yield Trouble(
                f"This process sees {self.usable_cores} cores, and its control group has time for {self.cpu_quota:g}. "
                f"Threads then wait for each other. Set OMP_NUM_THREADS={max(1, round(usable))}."
            )
        if threads is not None and threads > usable:
            yield Trouble(
                f"OMP_NUM_THREADS={threads} is more than the {usable:g} cores that this process has; threads then wait "
                "for each other. Unset it, or lower it."
            )
        if threads == 1 and usable > 1:
            yield Trouble(
                f"OMP_NUM_THREADS=1 lets torch compute on one core of {usable:g}. Unset it for training on the CPU in "
                "one process; `lockstep run` divides the cores among its workers."
            )
        if self.load > 1.5 * self.usable_cores:
            yield Trouble(
                f"The load average is {self.load:.1f} on {self.usable_cores} cores: other programs compute too. "
                "Threads that wait for each other then take time from those that compute, unless "
                "OMP_WAIT_POLICY=passive is set."
            )


def examine_limits() -> Section:
    """The probe."""
    limits = read_limits()
    return Section(title="limits", facts=limits.facts(), troubles=tuple(limits.troubles()))


def read_limits(groups: Path = Path("/sys/fs/cgroup"), shared: Path = Path("/dev/shm")) -> Limits:
    """Reads the limits of this process."""
    folders = list(control_groups(groups=groups))
    space = shutil.disk_usage(shared) if shared.is_dir() else None
    return Limits(
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        # A group has no more than the groups around it, so the smallest quota counts.
        cpu_quota=min((quota for folder in folders if (quota := _cpu_quota(folder)) is not None), default=None),
        omp_threads=os.environ.get("OMP_NUM_THREADS", ""),
        load=os.getloadavg()[0],
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_mb=available_mb(groups=groups),
        memory_limit=min((most for folder in folders if (most := _memory_limit(folder)) is not None), default=None),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        shared=None if space is None else (space.total, space.free),
        disk=(shutil.disk_usage(".").free, shutil.disk_usage(tempfile.gettempdir()).free),
    )


def _cpu_quota(folder: Path) -> float | None:
    """How many cores' time a control group has."""
    # "200000 100000" is two cores' time in each period (Linux, cgroup-v2.rst); "max" is no quota.
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _memory_limit(folder: Path) -> int | None:
    text = _read(folder / "memory.max").strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii") if path.exists() else ""
