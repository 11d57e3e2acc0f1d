"""Where and with what a run was made: processor, memory, versions, commit. Facts are read, never guessed."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The circumstances of a run."""

    processor: str  # its name
    cores: int  # that this process may use
    memory_gb: float  # in all
    system: str  # kernel
    python: str  # version
    torch: str  # version
    transformers: str  # version, or "unknown"
    commit: str  # of the source tree that this package lies in, with "and local changes" where there are some
    load: float  # the machine's load average over the last minute, before the run; 0 is a machine of our own

    @property
    def facts(self) -> list[tuple[str, str]]:
        """For the head of a report, as pairs of a name and a text."""
        where = f"{self.processor}, {self.cores} cores, {self.memory_gb:.0f} GB, {self.system}"
        return [
            ("machine", f"{where}; load average before the run {self.load:.2f}"),
            ("versions", f"Python {self.python}, torch {self.torch}, transformers {self.transformers}"),
            ("commit", self.commit),
        ]


def this_machine() -> Machine:
    """The machine that this runs on, now."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=_version("transformers"),
        commit=commit_of(Path(__file__).parents[1]),
        load=os.getloadavg()[0],
    )


def commit_of(folder: Path) -> str:
    """The commit checked out around ``folder``; "unknown" outside a checkout or without git."""
    commit = _git(folder, "rev-parse", "--short=10", "HEAD")
    if commit is None:
        return _UNKNOWN
    return f"{commit} and local changes" if _git(folder, "status", "--porcelain", "--", ".") else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or _UNKNOWN


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _UNKNOWN
