"""What the launcher and its workers share by name: the files of a run, and environment variables. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

GUARD_VARIABLE = "LOCKSTEP_PARENT_DEATH"
"""The environment variable with the path of the ``ParentDeathGuard`` that ends a worker with its launcher."""


@dataclass(frozen=True)
class WorkerPaths:
    """The files of one attempt of one worker: "worker-1.log", and "worker-1.attempt-2.log" after two restarts."""

    folder: Path  # the folder of the files
    worker: int  # the worker's rank among the workers of all hosts
    attempt: int  # how often the workers had been restarted

    @property
    def log(self) -> Path:
        """What the worker printed."""
        return self.file("log")

    @property
    def failure(self) -> Path:
        """The ``FailureRecord`` that the worker writes."""
        return self.file("failure.json")

    @property
    def error(self) -> Path:
        """The pickled exception."""
        return self.file("failure.pickle")

    @property
    def stacks(self) -> Path:
        """What the worker's threads were doing when its time was up."""
        return self.file("stacks.txt")

    def file(self, suffix: str) -> Path:
        """The file with this suffix."""
        stem = f"worker-{self.worker}" if self.attempt == 0 else f"worker-{self.worker}.attempt-{self.attempt}"
        return self.folder / f"{stem}.{suffix}"


def semaphore_prefix(folder: Path) -> str:
    """The beginning of the names of multiprocessing's semaphores in the workers of a run, and in no other process."""
    return f"/lockstep-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
