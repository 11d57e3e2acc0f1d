"""Which of the forms declares the cluster. ``resolve_cluster`` is pure; the two at the end read the environment.

What comes first counts: TF_CONFIG, which somebody wrote for this very process; then torchrun's variables, since a
launcher may itself run inside a SLURM step; then SLURM's. The first two must not contradict each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.cluster.slurm import is_job_step, parse_slurm
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import parse_tf_config
from lockstep.cluster.torchrun import parse_torchrun
from lockstep.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class DeclaredJob:
    """A job of several workers that train, of which this process is one.

    Args:
        source: who says so: "TF_CONFIG", "torchrun" or "SLURM".
        workers: how many processes take part.
    """

    source: str
    workers: int


def resolve_cluster(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``environment`` declares, or None if it declares none.

    Raises:
        ClusterError: a form that is malformed or incomplete, or two that contradict each other.
    """
    written = parse_tf_config(environment)
    launched = _launched(environment)
    if written is None:
        return launched or parse_slurm(environment)
    if launched is not None:
        _check_agreement(written, launched)
    return written


def find_job(environment: Mapping[str, str]) -> DeclaredJob | None:
    """The job of several workers that a process with ``environment`` trains in.

    None for a single worker, for an evaluator, and for WORLD_SIZE without RANK: that says how many processes somebody
    plans, and not that this is one of them.

    Raises:
        ClusterError: as ``resolve_cluster``.
    """
    if not environment.get("RANK"):
        environment = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    cluster = resolve_cluster(environment)
    if cluster is None or cluster.task != "worker" or cluster.num_workers == 1:
        return None
    return DeclaredJob(source=cluster.source, workers=cluster.num_workers)


def cluster_from_environment() -> ClusterSpec | None:
    """The cluster that this process's environment declares; see ``resolve_cluster``."""
    return resolve_cluster(os.environ)


def declared_job() -> DeclaredJob | None:
    """The job of several workers that this process trains in by its environment; see ``find_job``."""
    return find_job(os.environ)


def _launched(environment: Mapping[str, str]) -> ClusterSpec | None:
    """What a launcher declares. Job scripts often export WORLD_SIZE for all: in a SLURM step it takes RANK to count."""
    if is_job_step(environment) and not environment.get("RANK"):
        return None
    return parse_torchrun(environment)


def _check_agreement(written: ClusterSpec, launched: ClusterSpec) -> None:
    """Refuses one TF_CONFIG that several launched processes inherited: each would take itself for the same worker."""
    if written.task != "worker" or launched.num_workers == 1:
        return
    if (written.num_workers, written.index) != (launched.num_workers, launched.index):
        raise ClusterError(
            f"TF_CONFIG declares worker {written.index} of {written.num_workers}, and {launched.source}'s RANK and "
            f"WORLD_SIZE declare worker {launched.index} of {launched.num_workers}; unset the one that is not meant"
        )
