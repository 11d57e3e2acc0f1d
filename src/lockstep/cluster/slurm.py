"""SLURM's variables inside a job step, where one task of ``srun`` is one worker. Pure.

A batch script is no worker: the tasks of its SLURM_NTASKS may be started later. The chief's store listens on the
step's first host, where SLURM puts task 0, or at MASTER_ADDR; at a port derived from the job's id, or at MASTER_PORT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.checks import shown
from lockstep.cluster.launcher_variables import ALONE
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.variables import FIRST_PORT, PORTS, Variables
from lockstep.errors import ClusterError

_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_REMEDY = "srun sets them for every task: start the workers with `srun python train.py` inside the job"

# Ids from here up are SLURM's own steps (slurm.h: interactive 0xfffffffa, batch 0xfffffffb ...): a shell, no worker.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Ports of the steps of one job, which may share a host, lie far apart, and so do those of consecutive jobs.
_STRIDE = 7919

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
    index, size = step_numbers(environment)
    job, step = variables.number("SLURM_JOB_ID"), variables.count("SLURM_STEP_ID")
    return ClusterSpec(
        workers=(_slurm_chief(variables, step_port(job, step)), *[""] * (size - 1)),
        index=index,
        job_id=variables.job_id() or f"slurm-{job}.{step}",
        source="SLURM",
        attempt=variables.count("SLURM_RESTART_COUNT"),  # a job that is queued again keeps its id
    )


def step_numbers(environment: Mapping[str, str]) -> tuple[int, int]:
    """The number of a task of a job step, and how many there are. Raises ClusterError in a heterogeneous step."""
    variables = Variables(environment, "SLURM", _SLURM_REMEDY)
    variables.require("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    size, index = variables.number("SLURM_STEP_NUM_TASKS", least=1), variables.number("SLURM_PROCID")
    if index >= size:
        raise ClusterError(
            f"SLURM: SLURM_PROCID={index} is beyond SLURM_STEP_NUM_TASKS={size}, as in a heterogeneous job, of which a "
            "step counts the tasks of each component by itself; heterogeneous jobs are not supported by SLURM's "
            "variables: start the tasks of one component (`srun --het-group=0 python train.py`), or number all tasks "
            "yourself (`srun --het-group=0,1 sh -c 'RANK=$SLURM_PROCID WORLD_SIZE=4 MASTER_ADDR=hosta "
            f"MASTER_PORT=29500 exec python train.py'`); {ALONE}"
        )
    return index, size


def step_port(job: int, step: int) -> int:
    """The port of a job step's store, from 15000 to 29999, which all its tasks derive without talking to each other."""
    # _STRIDE is prime and does not divide PORTS, so the steps of a job visit every port before one comes again.
    return FIRST_PORT + (job + _STRIDE * step) % PORTS


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
    ranges = [
        (int(first), int(last)) for bracket in brackets for first, last in re.findall("([0-9]+)-([0-9]+)", bracket)
    ]
    if match is None or any(first > last for first, last in ranges):
        raise ClusterError(f"{shown(text)} is not a list of hosts; for example 'node[01-03,07],login1'")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[1]), "," not in text and not ranges
