"""Whether the environment declares a job of several workers: TF_CONFIG, torchrun's variables, SLURM's.

Pure on a mapping, but for ``declared_job``, which reads the process's environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

_TRAINING_ROLES = ("chief", "master", "worker")


@dataclass(frozen=True, kw_only=True)
class DeclaredJob:
    """A job of several workers, as somebody declared it.

    Args:
        source: the variable that says so.
        workers: how many processes take part.
    """

    source: str
    workers: int


def declared_job() -> DeclaredJob | None:
    """The job of several workers that this process's environment declares; None if it declares none."""
    return find_job(os.environ)


def find_job(environment: Mapping[str, str]) -> DeclaredJob | None:
    """The job that ``environment`` declares; None for a single worker, or for nothing that can be read.

    SLURM's number of tasks counts only in a task of a job step: in a batch script it is what may be started later.
    """
    counts = {
        "TF_CONFIG": _tf_config_workers(environment.get("TF_CONFIG", "")),
        "WORLD_SIZE": _number(environment.get("WORLD_SIZE", "")) if "RANK" in environment else 0,
        "SLURM_STEP_NUM_TASKS": _number(environment.get("SLURM_STEP_NUM_TASKS", "")),
    }
    for source, workers in counts.items():
        if workers > 1:
            return DeclaredJob(source=source, workers=workers)
    return None


def _tf_config_workers(text: str) -> int:
    try:
        declared = json.loads(text)
    except ValueError:
        return 0
    cluster = declared.get("cluster") if isinstance(declared, dict) else None
    if not isinstance(cluster, dict):
        return 0
    return sum(len(cluster[role]) for role in _TRAINING_ROLES if isinstance(cluster.get(role), list))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
