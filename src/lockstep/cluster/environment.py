"""The cluster that environment variables declare: TF_CONFIG, torchrun's variables or SLURM's, the first that is there.

TF_CONFIG, which somebody wrote for this very process, comes before torchrun's variables, and these before SLURM's,
because a launcher may run inside a SLURM step. The first two must not contradict each other.

Everything here is pure but for the defaults of ``cluster_from_environment`` and ``declared_job``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from lockstep.checks import shown
from lockstep.cluster.spec import ClusterSpec, Task, check_addresses, check_job_id, join_address, parse_address
from lockstep.errors import ClusterError

JOB_ID_VARIABLE = "LOCKSTEP_JOB_ID"
"""Names the job in every form; equal on all its workers, and different for every job."""


def cluster_from_environment(environment: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The cluster that the environment, by default that of this process, declares; None if it declares none.

    Raises ClusterError if a form is malformed or incomplete, or two contradict each other.
    """
    written = parse_tf_config(environment)
    # Job scripts often export WORLD_SIZE for all tasks: in a SLURM step it only counts with RANK.
    launched = None
    if environment.get("RANK") or not is_job_step(environment):
        launched = parse_torchrun(environment)
    if written is None:
        return launched or parse_slurm(environment)
    # One TF_CONFIG that several launched processes inherited would make each the same worker.
    inherits = launched is not None and launched.num_workers > 1 and written.task == "worker"
    if launched and inherits and (written.num_workers, written.index) != (launched.num_workers, launched.index):
        raise ClusterError(
            f"TF_CONFIG declares worker {written.index} of {written.num_workers}, and {launched.source}'s RANK and "
            f"WORLD_SIZE declare worker {launched.index} of {launched.num_workers}; unset the one that is not meant"
        )
    return written


def declared_job(environment: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The cluster of several workers in which a process with this environment trains.

    None for a single worker, for an evaluator, and for WORLD_SIZE without RANK, which says how many processes somebody
    plans and not that this is one of them. Raises as ``cluster_from_environment``.
    """
    if not environment.get("RANK"):
        environment = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    cluster = cluster_from_environment(environment)
    return cluster if cluster is not None and cluster.task == "worker" and cluster.num_workers > 1 else None


class Variables:
    """Environment variables that ``source`` sets, with a ClusterError that names the variable for each bad value.

    ``remedy`` says what to do if variables are missing.
    """

    def __init__(self, environment: Mapping[str, str], source: str, remedy: str = "") -> None:
        self._environment, self._source, self._remedy = environment, source, remedy

    def get(self, name: str) -> str:
        """The value of a variable; empty if it is not set."""
        return self._environment.get(name, "")

    def require(self, *names: str) -> None:
        """Checks that variables are set and not empty."""
        missing = [name for name in names if not self.get(name)]
        if missing:
            present = " ".join(f"{name}={shown(self.get(name))}" for name in names if self.get(name))
            raise ClusterError(
                f"{self._source}: {' '.join(missing)} not set (there is {present or 'none of them'}); {self._remedy}"
            )

    def number(self, name: str, *, least: int = 0, most: int | None = None) -> int:
        """The whole number in a variable, in decimal digits."""
        text = self.get(name).strip()
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
        if number is None or number < least or (most is not None and number > most):
            limits = f"from {least} to {most}" if most is not None else f"from {least} up"
            received = shown(self._environment.get(name))
            raise ClusterError(f"{self._source}: {name}={received}; it must be a whole number {limits}")
        return number

    def count(self, name: str) -> int:
        """The number in a variable; 0 if the variable is not set."""
        return self.number(name) if self.get(name) else 0

    def port(self, name: str) -> int:
        """The port in a variable."""
        return self.number(name, least=1, most=65535)

    def address(self, host: str, port: int, name: str) -> str:
        """The address of the chief's store on a host that the variable ``name`` gave, IPv6 with or without brackets."""
        address = join_address(host.removeprefix("[").removesuffix("]"), port)
        try:
            parse_address(address)
        except ClusterError as error:
            raise ClusterError(f"{self._source}: {name}={shown(host)} is not a host: {error}") from None
        return address

    def job_id(self) -> str:
        """The id in ``LOCKSTEP_JOB_ID``; empty if it is not set."""
        check_job_id(self.get(JOB_ID_VARIABLE), JOB_ID_VARIABLE)
        return self.get(JOB_ID_VARIABLE)


# ---- TF_CONFIG: one JSON text, which differs between the workers only in its task
#
# The task types are chief (at most one; without one worker 0 is the chief), worker and evaluator. master is an older
# name of chief that hosted services still write. With a chief, TensorFlow's worker i is worker i + 1 here. Other fields
# say nothing about the workers and are not read.

EXAMPLE = '{"cluster": {"worker": ["hosta:20000", "hostb:20000"]}, "task": {"type": "worker", "index": 0}}'

_CHIEFS = ("chief", "master")
_TYPES = (*_CHIEFS, "worker", "evaluator")


def parse_tf_config(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``TF_CONFIG`` declares; None if the variable is not set or empty.

    Without a cluster in it, or with one worker, it declares a cluster of one. Raises ClusterError for anything else.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        declared = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"{shown(text)} is not JSON ({error})") from None
    if not isinstance(declared, dict):
        raise _malformed(f"{shown(declared)} is not a JSON object")
    cluster = _read_cluster(declared.get("cluster") or {})
    workers = tuple(address for name in (*_CHIEFS, "worker") for address in cluster.get(name, ()))
    task, index = _read_task(declared.get("task"), cluster, alone=len(workers) <= 1)
    job_id = Variables(environment, "TF_CONFIG").job_id()
    return ClusterSpec(workers=workers or ("",), index=index, task=task, job_id=job_id, source="TF_CONFIG")


def _read_cluster(cluster: Any) -> dict[str, list[str]]:
    """The checked addresses of each task type."""
    if not isinstance(cluster, dict) or any(
        name not in _TYPES or not isinstance(addresses, list) for name, addresses in cluster.items()
    ):
        raise _malformed(
            f"cluster is {shown(cluster)}; it must map chief, worker and evaluator to lists of addresses (there are no "
            "parameter servers here: every worker keeps a copy of the weights)"
        )
    chiefs = [address for name in _CHIEFS for address in cluster.get(name, ())]
    if len(chiefs) > 1:
        raise _malformed(f"cluster has {len(chiefs)} chiefs ({shown(chiefs)}); list all but one as worker")
    try:
        check_addresses(
            {f"cluster.{name}[{i}]": each for name, listed in cluster.items() for i, each in enumerate(listed)}
        )
    except ClusterError as error:
        raise _malformed(str(error)) from None
    return cluster


def _read_task(task: object, cluster: Mapping[str, list[str]], *, alone: bool) -> tuple[Task, int]:
    """The task and its index in our counting, where the chief is worker 0."""
    if task is None and alone:
        return "worker", 0
    kind, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if kind not in _TYPES or type(index) is not int:
        raise _malformed(
            f"task is {shown(task)}; it must say which worker this process is, with a type (chief, worker or evaluator)"
            " and an index, a whole number without quotes"
        )
    places = len(cluster.get(kind, ())) if any(cluster.values()) else 1
    if kind == "evaluator" and not cluster.get(kind):  # in TensorFlow evaluators need not be listed
        places = index + 1
    if not 0 <= index < places:
        raise _malformed(f"task is {kind} {index}, but cluster lists {places or 'none'} of that type, counted from 0")
    if kind == "evaluator":
        return "evaluator", index
    chiefs = sum(len(cluster.get(name, ())) for name in _CHIEFS)
    return "worker", index + (chiefs if kind == "worker" else 0)


def _malformed(what: str) -> ClusterError:
    return ClusterError(f"TF_CONFIG: {what}; for example TF_CONFIG='{EXAMPLE}'")


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


# ---- SLURM's variables inside a job step, where one task of ``srun`` is one worker
#
# A batch script is no worker: the tasks of its SLURM_NTASKS may be started later. The chief's store listens on the
# step's first host, where SLURM puts task 0, or at MASTER_ADDR; at a port derived from the job's id, or at MASTER_PORT.

_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_REMEDY = "srun sets them for every task: start the workers with `srun python train.py` inside the job"

# Ids from here up are SLURM's own steps (slurm.h: interactive 0xfffffffa, batch 0xfffffffb ...): a shell, no worker.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Above the ports of common services and below Linux's ephemeral ones (from 32768). Steps of one job, which may share a
# host, lie far apart, and so do consecutive jobs.
_FIRST_PORT, _PORTS, _STRIDE = 15000, 15000, 7919

_NUMBERS = r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*"
_HOST = rf"(?:[^\[\],\s]|\[{_NUMBERS}\])+"
_HOST_LIST = re.compile(rf"({_HOST})(?:,{_HOST})*")


def is_job_step(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task that ``srun`` started, and not a batch script or an interactive shell."""
    step = environment.get("SLURM_STEP_ID", "")
    special = step.isascii() and step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return bool(environment.get("SLURM_STEP_NUM_TASKS")) and not special


def parse_slurm(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that a job step's variables declare; None outside a step. A missing or bad one is a ClusterError."""
    if not is_job_step(environment):
        return None
    variables = Variables(environment, "SLURM", _SLURM_REMEDY)
    variables.require("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")
    size = variables.number("SLURM_STEP_NUM_TASKS", least=1)
    job, step = variables.number("SLURM_JOB_ID"), variables.count("SLURM_STEP_ID")
    return ClusterSpec(
        workers=(_slurm_chief(variables, step_port(job, step)), *[""] * (size - 1)),
        index=variables.number("SLURM_PROCID", most=size - 1),
        job_id=variables.job_id() or f"slurm-{job}.{step}",
        source="SLURM",
        attempt=variables.count("SLURM_RESTART_COUNT"),  # a job that is queued again keeps its id
    )


def step_port(job: int, step: int) -> int:
    """The port of a job step's store, from 15000 to 29999, which all its tasks derive without talking to each other."""
    return _FIRST_PORT + (job + _STRIDE * step) % _PORTS


def _slurm_chief(variables: Variables, port: int) -> str:
    if variables.get("MASTER_PORT"):
        port = variables.port("MASTER_PORT")
    if host := variables.get("MASTER_ADDR"):
        return variables.address(host, port, "MASTER_ADDR")
    name = next((name for name in _HOST_LISTS if variables.get(name)), None)
    if name is None:
        raise ClusterError(f"SLURM: none of {', '.join(_HOST_LISTS)} and MASTER_ADDR is set; {_SLURM_REMEDY}")
    try:
        first, is_only = first_host(variables.get(name))
    except ClusterError as error:
        raise ClusterError(f"SLURM: {name}: {error}") from None
    if not is_only and variables.get("SLURM_DISTRIBUTION").startswith("arbitrary"):
        # Under srun --distribution=arbitrary the list does not have the order of the tasks.
        raise ClusterError(
            f"SLURM: SLURM_DISTRIBUTION=arbitrary does not say which of {shown(variables.get(name))} has task 0; set "
            "MASTER_ADDR to the first host of the file in SLURM_HOSTFILE, or leave out --distribution=arbitrary"
        )
    return variables.address(first, port, name)


def first_host(text: str) -> tuple[str, bool]:
    """The first host of a list in SLURM's notation, "node[01-03,07],login", and whether it is the only one.

    A name may have several brackets: ``rack[0-1]n[1-2]`` begins with rack0n1. Raises ClusterError if it is no list.
    """
    text = text.strip()
    match, brackets = _HOST_LIST.fullmatch(text), re.findall(r"\[[^\]]*\]", text)
    ranges = [(int(first), int(last)) for each in brackets for first, last in re.findall("([0-9]+)-([0-9]+)", each)]
    if match is None or any(first > last for first, last in ranges):
        raise ClusterError(f"{shown(text)} is not a list of hosts; for example 'node[01-03,07],login1'")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[1]), "," not in text and not ranges
