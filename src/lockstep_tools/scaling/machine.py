"""Where and with what a run was made: processor, memory, versions, commit. Facts are read, never guessed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from lockstep.replicas.conditions import processor_name

_UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and the software of a run."""

    processor: str
    cores: int  # that this process may use
    memory_gb: float
    system: str  # kernel
    python: str
    torch: str
    transformers: str  # version, or "unknown"
    commit: str  # of the source tree around this package, with "and local changes" where there are some
    load: float  # load average of the last minute before the run

    @property
    def facts(self) -> list[tuple[str, str]]:
        """For the head of a report: names and texts."""
        where = f"{self.processor}, {self.cores} cores, {self.memory_gb:.0f} GB, {self.system}"
        return [
            ("machine", f"{where}; load average before the run {self.load:.2f}"),
            ("versions", f"Python {self.python}, torch {self.torch}, transformers {self.transformers}"),
            ("commit", self.commit),
        ]

    @property
    def warnings(self) -> list[str]:
        """What makes the times of the run doubtful, in whole sentences."""
        if self.load <= self.cores / 2:
            return []
        busy = (
            f"This machine was busy: the load average before the run was {self.load:.1f} on {self.cores} cores. The "
            "times are those of a shared machine and say little about scaling. Measure again when nothing else runs."
        )
        return [busy]


def this_machine() -> Machine:
    """The machine that this runs on, now."""
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers") if find_spec("transformers") else _UNKNOWN,
        commit=commit_of(Path(__file__).parents[1]),
        # Read before the run: the measurement itself raises it.
        load=os.getloadavg()[0],
    )


def commit_of(folder: Path) -> str:
    """The commit checked out around ``folder``; "unknown" outside a checkout or without git."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "--short=10", "HEAD"), ("status", "--porcelain", "--", "."))
        )
    except (OSError, subprocess.CalledProcessError):
        return _UNKNOWN
    return f"{commit} and local changes" if changes else commit
