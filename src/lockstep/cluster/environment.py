"""The cluster that environment variables declare, whichever launcher or service has set them.

    TF_CONFIG                which somebody wrote for this very process
    RANK                     torchrun's variables, and those of every PyTorch launcher
    launchers.LAUNCHERS      MPI's and other launchers, which may run inside what follows
    SERVICES, SLURM          what describes a job by its hosts or its steps
    launchers.INTERFACES     a number of this process and little else

The first that is there counts. TF_CONFIG and the numbers of a launcher must not contradict each other, and neither must
descriptions of the same kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from lockstep.cluster.launchers import INTERFACES, LAUNCHERS, SERVICES, find_launcher, parse_launcher
from lockstep.cluster.services import parse_sagemaker, parse_volcano, refuse_pbsdsh
from lockstep.cluster.slurm import is_job_step, parse_slurm
from lockstep.cluster.spec import ClusterSpec, check_job_id
from lockstep.cluster.tf_config import parse_cluster_spec, parse_tf_config
from lockstep.cluster.variables import Variables
from lockstep.errors import ClusterError

Parser = Callable[[Mapping[str, str]], ClusterSpec | None]


def cluster_from_environment(environment: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The cluster that the environment, by default that of this process, declares; None if it declares none.

    Raises ClusterError if a form is malformed or incomplete, or two contradict each other.
    """
    written = parse_tf_config(environment)
    if written is None:
        return _launched(environment)
    # One TF_CONFIG that several launched processes inherited would make each the same worker.
    if written.task == "worker" and (numbers := _numbers(environment)) is not None:
        source, workers, index = numbers
        if workers > 1 and (written.num_workers, written.index) != (workers, index):
            raise ClusterError(
                f"TF_CONFIG declares worker {written.index} of {written.num_workers}, and {source} declare worker "
                f"{index} of {workers}; unset the one that is not meant"
            )
    return written


def declared_job(environment: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The cluster of several workers in which a process with this environment trains.

    None for a single worker, for an evaluator, and for WORLD_SIZE without RANK, which says how many processes somebody
    plans and not that this is one of them. Raises as ``cluster_from_environment``.
    """
    cluster = declared_cluster(environment)
    return cluster if cluster is not None and cluster.task == "worker" and cluster.num_workers > 1 else None


def declared_cluster(environment: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """As ``cluster_from_environment``, for a process that WORLD_SIZE without RANK does not make one of several."""
    if not environment.get("RANK"):
        environment = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    return cluster_from_environment(environment)


def _launched(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster without TF_CONFIG."""
    # Job scripts often export WORLD_SIZE for all tasks: beside another description it only counts with RANK.
    if environment.get("RANK"):
        return parse_torchrun(environment)
    if (launcher := find_launcher(environment, LAUNCHERS)) is not None:
        return parse_launcher(environment, launcher)
    if (described := _described(environment)) is not None:
        return described
    if (launcher := find_launcher(environment, INTERFACES)) is not None:
        return parse_launcher(environment, launcher)
    refuse_pbsdsh(environment)
    return parse_torchrun(environment)


def _numbers(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """What a launcher says of this process: the names of its variables, the number of processes, and this one's."""
    launcher = None if environment.get("RANK") else find_launcher(environment, LAUNCHERS)
    if launcher is not None:
        variables = Variables(environment, launcher.name)
        names = f"{launcher.name}'s {launcher.rank} and {launcher.size}"
        return names, variables.count(launcher.size), variables.count(launcher.rank)
    if not environment.get("RANK") and is_job_step(environment):
        return None
    launched = parse_torchrun(environment)
    return None if launched is None else ("torchrun's RANK and WORLD_SIZE", launched.num_workers, launched.index)


def _services(environment: Mapping[str, str]) -> Iterator[ClusterSpec]:
    for row in SERVICES:
        if row.is_recognised(environment):
            yield parse_launcher(environment, row)
    parsers: tuple[Parser, ...] = (parse_cluster_spec, parse_sagemaker, parse_volcano, parse_slurm)
    for parse in parsers:
        if (cluster := parse(environment)) is not None:
            yield cluster


def _described(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of services and of SLURM: the one of several workers, as a service may start a step on each host."""
    clusters = list(_services(environment))
    several = [cluster for cluster in clusters if cluster.task != "worker" or cluster.num_workers > 1]
    for cluster in several[1:]:
        if (cluster.num_workers, cluster.index) != (several[0].num_workers, several[0].index):
            raise ClusterError(
                f"{several[0].source} declares worker {several[0].index} of {several[0].num_workers}, and "
                f"{cluster.source} declares worker {cluster.index} of {cluster.num_workers}; say which is meant in "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
    return next(iter([*several, *clusters]), None)


# ---- torchrun's variables, which every PyTorch launcher sets, ``lockstep run`` and Kubeflow's trainer among them
#
# They name the chief's address alone. torch's elastic agent adds who serves the store there, the job's id, and how
# often it restarted the workers.

_TORCHRUN_REMEDY = (
    "start the program with `lockstep run` or torchrun, which set them all, or set the rest, for example "
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=hosta MASTER_PORT=29500"
)
_TORCHRUN_NO_ID = "none"  # torchrun's id for every run without --rdzv-id


def parse_torchrun(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that torchrun's variables declare; None if neither RANK nor WORLD_SIZE is set.

    Raises ClusterError if some are missing, not numbers, or out of range.
    """
    variables = Variables(environment, "torchrun", _TORCHRUN_REMEDY)
    if not (variables.get("RANK") or variables.get("WORLD_SIZE")):
        return None
    variables.require("RANK", "WORLD_SIZE")
    size = variables.number("WORLD_SIZE", least=1)
    chief = ""  # a single worker needs no address
    if size > 1 or variables.get("MASTER_ADDR") or variables.get("MASTER_PORT"):
        variables.require("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        chief = variables.address(variables.get("MASTER_ADDR"), variables.port("MASTER_PORT"), "MASTER_ADDR")
    run_id = variables.get("TORCHELASTIC_RUN_ID")
    check_job_id(run_id, "torchrun: TORCHELASTIC_RUN_ID")
    return ClusterSpec(
        workers=(chief, *[""] * (size - 1)),
        index=variables.number("RANK", most=size - 1),
        job_id=variables.job_id() or ("" if run_id == _TORCHRUN_NO_ID else run_id),
        source="torchrun",
        attempt=variables.count("TORCHELASTIC_RESTART_COUNT"),
        store_is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
