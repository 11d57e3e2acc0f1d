"""Which form declares the cluster: TF_CONFIG, torchrun's variables or SLURM's.

``cluster_from_environment`` and ``declared_job`` read the environment of this process; the others are pure.

The first form that is there counts: TF_CONFIG, which somebody wrote for this very process; then torchrun's variables,
because a launcher may run inside a SLURM step; then SLURM's. The first two must not contradict each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.cluster.slurm import is_job_step, parse_slurm
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import parse_tf_config
from lockstep.cluster.torchrun import parse_torchrun
from lockstep.errors import ClusterError


def resolve_cluster(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``environment`` declares; None if it declares none.

    Raises:
        ClusterError: a form is malformed or incomplete, or two contradict each other.
    """
    written = parse_tf_config(environment)
    # Job scripts often export WORLD_SIZE for all tasks: in a SLURM step it only counts with RANK.
    launched = None
    if environment.get("RANK") or not is_job_step(environment):
        launched = parse_torchrun(environment)
    if written is None:
        return launched or parse_slurm(environment)
    if launched is not None:
        _check_agreement(written, launched)
    return written


def find_job(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of several workers in which a process with ``environment`` trains.

    None for a single worker, for an evaluator, and for WORLD_SIZE without RANK, which says how many processes somebody
    plans and not that this is one of them.

    Raises:
        ClusterError: as ``resolve_cluster``.
    """
    if not environment.get("RANK"):
        environment = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    cluster = resolve_cluster(environment)
    if cluster is None or cluster.task != "worker" or cluster.num_workers == 1:
        return None
    return cluster


def cluster_from_environment() -> ClusterSpec | None:
    """``resolve_cluster`` with the environment of this process."""
    return resolve_cluster(os.environ)


def declared_job() -> ClusterSpec | None:
    """``find_job`` with the environment of this process."""
    return find_job(os.environ)


def _check_agreement(written: ClusterSpec, launched: ClusterSpec) -> None:
    """Refuses one TF_CONFIG that several launched processes inherited: each would be the same worker."""
    if written.task != "worker" or launched.num_workers == 1:
        return
    if (written.num_workers, written.index) != (launched.num_workers, launched.index):
        raise ClusterError(
            f"TF_CONFIG declares worker {written.index} of {written.num_workers}, and {launched.source}'s RANK and "
            f"WORLD_SIZE declare worker {launched.index} of {launched.num_workers}; unset the one that is not meant"
        )
