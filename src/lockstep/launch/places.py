"""Where the launcher and its workers meet: the names of files in the run's private folder, and of variables."""

from __future__ import annotations

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
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "WORLD_SIZE",
    }
)
"""What torch's agent sets for every worker."""


def record_path(folder: Path, local: int) -> Path:
    """Where a worker of this host writes down how it failed."""
    return folder / f"failure-{local}.json"


def error_path(folder: Path, local: int) -> Path:
    """Where it leaves the exception itself."""
    return folder / f"failure-{local}.pickle"
