"""Services that list the hosts of a job, and processes that belong to a job which no variable describes whole. Pure.

An allocation is no job: LSF, PBS and SLURM name their hosts in the batch script and in an interactive shell too, where
a single program may run. Only what a launcher has started inside it is a process among others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from lockstep.checks import shown
from lockstep.cluster.launcher_variables import ALONE
from lockstep.cluster.spec import ClusterSpec, join_address
from lockstep.cluster.variables import Variables, job_port
from lockstep.errors import ClusterError

_SAGEMAKER = "SageMaker"
_VOLCANO_HOSTS = re.compile(r"VC_(.+)_HOSTS")


def parse_sagemaker(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of SM_HOSTS, a JSON list of host names that is equal on all hosts, and SM_CURRENT_HOST, one of them.

    None if the variables are not set. The port is MASTER_PORT, or derived from the list.
    """
    variables = Variables(environment, _SAGEMAKER, "SageMaker's containers set both; or set TF_CONFIG")
    if not (text := variables.get("SM_HOSTS")):
        return None
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(
            f'SageMaker: SM_HOSTS={shown(text)} is not a list of hosts; for example \'["algo-1", "algo-2"]\''
        )
    if len(hosts) == 1:
        return ClusterSpec(workers=("",), index=0, job_id=variables.job_id(), source=_SAGEMAKER)
    variables.require("SM_HOSTS", "SM_CURRENT_HOST")
    if (host := variables.get("SM_CURRENT_HOST")) not in hosts:
        raise ClusterError(f"SageMaker: SM_CURRENT_HOST={shown(host)} is none of SM_HOSTS={shown(text)}; correct one")
    port = variables.port("MASTER_PORT") if variables.get("MASTER_PORT") else job_port(text)
    return ClusterSpec(
        workers=tuple(join_address(name, port) for name in hosts),
        index=hosts.index(host),
        job_id=variables.job_id() or variables.get("TRAINING_JOB_NAME"),
        source=_SAGEMAKER,
    )


def parse_volcano(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of a Volcano job with one group of tasks: VC_TASK_INDEX and, for a group "worker", VC_WORKER_HOSTS.

    None without the lists, which Volcano's svc plugin makes. With several groups no variable says of which this is.
    """
    variables = Variables(environment, "Volcano", "enable Volcano's env plugin, which sets it")
    groups = {name: variables.get(name) for name in environment if _VOLCANO_HOSTS.fullmatch(name)}
    hosts = [host for listed in groups.values() for host in listed.replace(",", " ").split()]
    if not hosts:
        return None
    if len(hosts) == 1:
        return ClusterSpec(workers=("",), index=0, job_id=variables.job_id(), source="Volcano")
    if len(groups) > 1:
        raise ClusterError(
            f"Volcano: {', '.join(sorted(groups))} list {len(hosts)} tasks in {len(groups)} groups, and no variable "
            "says of which group this task is; for MultiWorkerMirroredStrategy or ParallelStrategy enable the plugin "
            f"`pytorch: []`, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {ALONE}"
        )
    variables.require("VC_TASK_INDEX")
    port = variables.port("MASTER_PORT") if variables.get("MASTER_PORT") else job_port(" ".join(hosts))
    return ClusterSpec(
        workers=tuple(join_address(host, port) for host in hosts),
        index=variables.number("VC_TASK_INDEX", most=len(hosts) - 1),
        job_id=variables.job_id(),
        source="Volcano",
    )


def is_started_by_pbsdsh(environment: Mapping[str, str]) -> bool:
    """Whether pbsdsh has started this process.

    PBS numbers the hosts of a job from 0, and the tasks of each host from 1. The job's script is task 1 of host 0.
    """
    variables = Variables(environment, "PBS")
    return bool(variables.get("PBS_JOBID")) and (
        variables.count("PBS_NODENUM") > 0 or variables.count("PBS_TASKNUM") > 1
    )


def refuse_pbsdsh(environment: Mapping[str, str]) -> None:
    """Raises ClusterError in a process that pbsdsh has started, which knows its number only."""
    if is_started_by_pbsdsh(environment):
        variables = Variables(environment, "PBS")
        host, task = variables.count("PBS_NODENUM"), variables.count("PBS_TASKNUM")
        raise ClusterError(
            f"PBS: PBS_NODENUM={host} and PBS_TASKNUM={task} show that pbsdsh has started this process, and no "
            "variable says how many there are; for MultiWorkerMirroredStrategy or ParallelStrategy write in the job's "
            "script `pbsdsh -- sh -c 'RANK=$PBS_NODENUM WORLD_SIZE=4 MASTER_ADDR=hosta MASTER_PORT=29500 exec python "
            f"train.py'`, with the first host of $PBS_NODEFILE for hosta; {ALONE}"
        )
