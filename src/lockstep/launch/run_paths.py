"""Where the launcher and its workers meet: the names of files of a run, and of variables. Pure."""

from __future__ import annotations

import hashlib
from pathlib import Path

AGENT_VARIABLES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "WORLD_SIZE",
    }
)
"""What torch's agent sets for every worker."""

LIFELINE = "LOCKSTEP_LIFELINE"
"""The variable that names the ``Lifeline`` that a worker hangs on."""


def log_path(folder: Path, worker: int, attempt: int) -> Path:
    """What a worker printed: "worker-1.log", and "worker-1.attempt-2.log" after two restarts."""
    return _path(folder, worker, attempt, "log")


def record_path(folder: Path, worker: int, attempt: int) -> Path:
    """Where a worker writes down how it failed."""
    return _path(folder, worker, attempt, "failure.json")


def error_path(folder: Path, worker: int, attempt: int) -> Path:
    """Where it leaves the exception itself."""
    return _path(folder, worker, attempt, "failure.pickle")


def stacks_path(folder: Path, worker: int, attempt: int) -> Path:
    """Where it says what it is doing when its time is up."""
    return _path(folder, worker, attempt, "stacks.txt")


def pipe_path(folder: Path, worker: int, attempt: int, stream: str) -> Path:
    """A pipe of a worker that is no child of the launcher."""
    return _path(folder, worker, attempt, stream)


def _path(folder: Path, worker: int, attempt: int, ending: str) -> Path:
    stem = f"worker-{worker}" if attempt == 0 else f"worker-{worker}.attempt-{attempt}"
    return folder / f"{stem}.{ending}"


def semaphore_prefix(folder: Path) -> str:
    """What the names of the semaphores begin with that multiprocessing makes in a worker: this run's alone."""
    return f"/lockstep-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
