"""The cluster that environment variables declare, whichever launcher or service has set them.

    TF_CONFIG                        which somebody wrote for this very process
    RANK                             torchrun's variables, and those of every PyTorch launcher
    launcher_variables.LAUNCHERS     MPI's and other launchers, which may run inside what follows
    SERVICES, SLURM                  what describes a job by its hosts or its steps
    launcher_variables.INTERFACES    a number of this process and little else

The first that is there counts. TF_CONFIG must not contradict what the others say of this process, and neither must
descriptions of the same kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from lockstep.checks import shown
from lockstep.cluster.launcher_variables import (
    ALONE,
    INDEXED_JOB,
    INTERFACES,
    LAUNCHERS,
    SERVICES,
    Place,
    find_launcher,
    launcher_place,
    parse_launcher,
)
from lockstep.cluster.mpi_address import ask_mpi
from lockstep.cluster.services import is_started_by_pbsdsh, parse_sagemaker, parse_volcano, refuse_pbsdsh
from lockstep.cluster.slurm import is_job_step, parse_slurm, step_numbers
from lockstep.cluster.spec import ClusterSpec, check_job_id
from lockstep.cluster.tf_config import listed_evaluators, parse_cluster_spec, parse_tf_config
from lockstep.cluster.variables import Variables
from lockstep.errors import ClusterError

Parser = Callable[[Mapping[str, str]], ClusterSpec | None]

# Those that list the hosts of a job, and the names of their variables.
_LISTS: dict[Parser, str] = {
    parse_cluster_spec: "Vertex AI's CLUSTER_SPEC",
    parse_sagemaker: "SageMaker's SM_HOSTS and SM_CURRENT_HOST",
    parse_volcano: "Volcano's VC_TASK_INDEX and lists of hosts",
}


def cluster_from_environment(environment: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The cluster that the environment, by default that of this process, declares; None if it declares none.

    Raises ClusterError if a form is malformed or incomplete, or two contradict each other.
    """
    written = parse_tf_config(environment)
    if written is None:
        return _launched(environment)
    # One TF_CONFIG that several launched processes inherited would make each the same worker.
    if written.task == "worker":
        for place in _places(environment, alone=written.num_workers == 1):
            if not _agrees(written, place, listed_evaluators(environment)):
                raise ClusterError(
                    f"TF_CONFIG declares worker {written.index} of {written.num_workers}, and {place.source} declare "
                    f"{_describe_place(place)}; unset TF_CONFIG, or list in it all processes that train; {ALONE}"
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
    """As ``cluster_from_environment``, for a process that WORLD_SIZE without RANK does not make one of several.

    Beside NODE_RANK it does: Lightning's variables number the hosts of a job so. So it does beside the index of a pod
    of Kubernetes.
    """
    is_numbered = environment.get("RANK") or _is_node(environment) or INDEXED_JOB.is_recognised(environment)
    if not is_numbered:
        # Job scripts export it for what they start later; a MirroredStrategy in the script itself trains alone.
        environment = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    return cluster_from_environment(environment)


def _launched(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster without TF_CONFIG."""
    # Job scripts often export WORLD_SIZE for all tasks: beside another description it only counts with RANK.
    if environment.get("RANK"):
        return parse_torchrun(environment)
    if (launcher := find_launcher(environment, LAUNCHERS)) is not None:
        # MPI knows this very process alone, and not one with other variables.
        return parse_launcher(environment, launcher, ask_mpi if environment is os.environ else None)
    if (described := _described(environment)) is not None:
        return described
    if (launcher := find_launcher(environment, INTERFACES)) is not None:
        return parse_launcher(environment, launcher)
    refuse_pbsdsh(environment)
    if _is_node(environment):
        raise _node_refusal(environment)
    return parse_torchrun(environment)


def _places(environment: Mapping[str, str], *, alone: bool) -> Iterator[Place]:
    """What launchers, services and SLURM say of this process: those of them that count, as in ``_launched``.

    Descriptions that cannot be followed raise ClusterError where TF_CONFIG has one worker, which is then ``alone``.
    Where it has several, they may be why it was written.
    """
    if environment.get("RANK"):
        yield _place(parse_torchrun(environment), "torchrun's RANK and WORLD_SIZE")
    elif (launcher := find_launcher(environment, LAUNCHERS)) is not None:
        yield launcher_place(environment, launcher)
    elif places := [*_described_places(environment, alone=alone)]:
        yield from places
    elif (launcher := find_launcher(environment, INTERFACES)) is not None:
        yield launcher_place(environment, launcher)
    elif is_started_by_pbsdsh(environment):
        host = Variables(environment, "PBS").count("PBS_NODENUM")
        yield Place(source="PBS_NODENUM and PBS_TASKNUM of pbsdsh", workers=None, index=host)
    elif environment.get("WORLD_SIZE"):
        size = Variables(environment, "torchrun").number("WORLD_SIZE", least=1)
        names = "NODE_RANK and WORLD_SIZE" if _is_node(environment) else "torchrun's variables, without RANK,"
        yield Place(source=names, workers=size, index=None)


def _described_places(environment: Mapping[str, str], *, alone: bool) -> Iterator[Place]:
    """What services and SLURM say of this process."""
    for row in SERVICES:
        if row.is_recognised(environment):
            yield launcher_place(environment, row)
    if is_job_step(environment):
        index, size = step_numbers(environment)
        yield Place(source="SLURM's SLURM_PROCID and SLURM_STEP_NUM_TASKS", workers=size, index=index)
    for parse, source in _LISTS.items():
        try:
            cluster = parse(environment)
        except ClusterError:
            # CLUSTER_SPEC is a name that others use too, and its error says to write TF_CONFIG.
            if alone and parse is not parse_cluster_spec:
                raise
            continue
        if cluster is not None and cluster.task == "worker":
            yield _place(cluster, source)


def _place(cluster: ClusterSpec | None, source: str) -> Place:
    if cluster is None:
        return Place(source=source, workers=None, index=None)
    return Place(source=source, workers=cluster.num_workers, index=cluster.index)


def _agrees(written: ClusterSpec, place: Place, evaluators: int) -> bool:
    """Whether a worker of TF_CONFIG can be a process that its surroundings describe so.

    A job may have processes that evaluate, and each of its processes may start several workers, such as one for each
    GPU of a host. A description of one process says nothing.
    """
    if place.workers == 1 or (place.workers is None and place.index is None):
        return True
    if place.workers is None or place.index is None:
        return written.num_workers > 1
    if place.workers in (written.num_workers, written.num_workers + evaluators):
        return written.index == place.index
    # Several workers of TF_CONFIG may have been started by one process of the launcher, such as one for each GPU of its
    # host.
    started, rest = divmod(written.num_workers, place.workers)
    return not rest and written.index // started == place.index


def _describe_place(place: Place) -> str:
    if place.workers is None:
        return f"worker {place.index} of several"
    return f"{place.workers} workers" if place.index is None else f"worker {place.index} of {place.workers}"


def _is_node(environment: Mapping[str, str]) -> bool:
    """Whether NODE_RANK and WORLD_SIZE, without RANK, make this process one of several, as Lightning's variables do."""
    size = environment.get("WORLD_SIZE", "").strip()
    several = size.isascii() and size.isdecimal() and int(size) > 1
    return (
        several
        and bool(environment.get("NODE_RANK"))
        and not (environment.get("RANK") or environment.get("LOCAL_RANK"))
    )


def _node_refusal(environment: Mapping[str, str]) -> ClusterError:
    node, size = environment["NODE_RANK"], environment["WORLD_SIZE"]
    return ClusterError(
        f"NODE_RANK={shown(node)} and WORLD_SIZE={shown(size)} make this process one of several, and no variable says "
        "which: RANK is not set; for MultiWorkerMirroredStrategy or ParallelStrategy write `export RANK=$NODE_RANK "
        "WORLD_SIZE=2 MASTER_ADDR=hosta MASTER_PORT=29500` with one process on each of 2 hosts, hosta for the first, "
        f"or start the program with `lockstep run` or torchrun; {ALONE}"
    )


def _services(environment: Mapping[str, str]) -> Iterator[ClusterSpec]:
    for row in SERVICES:
        if row.is_recognised(environment):
            yield parse_launcher(environment, row)
    for parse in (*_LISTS, parse_slurm):
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
