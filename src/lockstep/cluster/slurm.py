"""SLURM's variables inside a job step, where one task of ``srun`` is one worker. Pure.

    SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_STEP_NODELIST=node[01-02] SLURM_JOB_ID=4711 SLURM_STEP_ID=0

A batch script is no worker: the tasks of its ``SLURM_NTASKS`` may be started later. The chief's store listens on the
step's first host, where SLURM puts task 0, or at MASTER_ADDR; at a port derived from the job's id, or at MASTER_PORT.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from lockstep.cluster.address import shown
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.variables import chief_address, count, given_job_id, port_number, require_variables, whole_number
from lockstep.errors import ClusterError

_SOURCE = "SLURM"
_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_REMEDY = "srun sets them for every task: start the workers with `srun python train.py` inside the job"

# Ids from here up are SLURM's own steps (slurm.h: interactive 0xfffffffa, batch 0xfffffffb ...): a shell, no worker.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Above the ports of common services and below Linux's ephemeral ones (from 32768). Steps of one job, which may share a
# host, lie far apart, and so do consecutive jobs.
_FIRST_PORT, _PORTS, _STRIDE = 15000, 15000, 7919

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# SLURM's own limit (MAX_RANGE in its hostlist.c): a longer list is taken for a mistake and not expanded.
_MAX_HOSTS = 65536


def is_job_step(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task that ``srun`` started, and not a batch script or an interactive shell."""
    step = environment.get("SLURM_STEP_ID", "")
    special = step.isascii() and step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return bool(environment.get("SLURM_STEP_NUM_TASKS")) and not special


def parse_slurm(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that a job step's variables declare; None outside a step.

    Raises:
        ClusterError: some are missing, not numbers, or out of range, or the list of hosts is malformed.
    """
    if not is_job_step(environment):
        return None
    require_variables(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID"), _SOURCE, _REMEDY)
    size = whole_number(environment, "SLURM_STEP_NUM_TASKS", _SOURCE, least=1)
    job, step = (
        whole_number(environment, "SLURM_JOB_ID", _SOURCE, least=0),
        count(environment, "SLURM_STEP_ID", _SOURCE),
    )
    return ClusterSpec(
        workers=(_chief(environment, step_port(job, step)), *[""] * (size - 1)),
        index=whole_number(environment, "SLURM_PROCID", _SOURCE, least=0, most=size - 1),
        job_id=given_job_id(environment) or f"slurm-{job}.{step}",
        source=_SOURCE,
        attempt=count(environment, "SLURM_RESTART_COUNT", _SOURCE),  # a job that is queued again keeps its id
    )


def step_port(job: int, step: int) -> int:
    """The port of a job step's store, from 15000 to 29999, which all its tasks derive without talking to each other."""
    return _FIRST_PORT + (job + _STRIDE * step) % _PORTS


def _chief(environment: Mapping[str, str], port: int) -> str:
    if environment.get("MASTER_PORT"):
        port = port_number(environment, "MASTER_PORT", _SOURCE)
    if environment.get("MASTER_ADDR"):
        return chief_address(environment["MASTER_ADDR"], port, "MASTER_ADDR", _SOURCE)
    name = next((name for name in _HOST_LISTS if environment.get(name)), None)
    if name is None:
        raise ClusterError(f"{_SOURCE}: none of {', '.join(_HOST_LISTS)} and MASTER_ADDR is set; {_REMEDY}")
    try:
        hosts = expand_hosts(environment[name])
    except ClusterError as error:
        raise ClusterError(f"{_SOURCE}: {name}: {error}") from None
    if len(hosts) > 1 and environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        # Under srun --distribution=arbitrary the list does not have the order of the tasks.
        raise ClusterError(
            f"{_SOURCE}: SLURM_DISTRIBUTION=arbitrary does not say which of {shown(environment[name])} has task 0; set "
            "MASTER_ADDR to the first host of the file in SLURM_HOSTFILE, or leave out --distribution=arbitrary"
        )
    return chief_address(hosts[0], port, name, _SOURCE)


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a list in SLURM's notation, "node[01-03,07],login", as ``scontrol show hostnames`` prints them.

    A range keeps the width of its first number: ``[08-10]`` is 08, 09, 10. A name may have several brackets, of which
    the last runs fastest: ``rack[0-1]n[1-2]`` is rack0n1, rack0n2, rack1n1, rack1n2.

    Raises:
        ClusterError: an empty list or item, a bracket that is not closed, or something else than rising ranges in it.
    """
    hosts = tuple(itertools.islice(_hosts(text.strip()), _MAX_HOSTS + 1))
    if len(hosts) > _MAX_HOSTS:
        raise ClusterError(f"{shown(text)} names more than {_MAX_HOSTS} hosts; name those of this job alone")
    return hosts


def _hosts(text: str) -> Iterator[str]:
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _malformed(text, text[position:] or "its end")
        choices = [
            [part[2]] if part[2] else [number for one in part[1].split(",") for number in _numbers(text, one)]
            for part in _PARTS.finditer(item[0])
        ]
        yield from map("".join, itertools.product(*choices))
        position = item.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise _malformed(text, text[position:])
        position += 1


def _numbers(text: str, one: str) -> Iterator[str]:
    match = _RANGE.fullmatch(one)
    if match is None:
        raise _malformed(text, one)
    first, last = match[1], match[2] or match[1]
    if not 0 <= int(last) - int(first) < _MAX_HOSTS:
        raise _malformed(text, one)
    return (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _malformed(text: str, part: str) -> ClusterError:
    return ClusterError(f"{shown(text)} is no list of hosts, at {shown(part)}; for example 'node[01-03,07],login1'")
