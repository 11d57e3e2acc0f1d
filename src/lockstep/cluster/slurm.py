"""SLURM's variables inside a job step: one task of ``srun`` is one worker. Pure.

    SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_STEP_NODELIST=node[01-02] SLURM_JOB_ID=4711 SLURM_STEP_ID=0

A batch script is no worker: what ``SLURM_NTASKS`` says there may be started later. The chief's store listens on the
step's first host, where SLURM puts task 0, or at MASTER_ADDR; at a port that follows from the job's id, or at
MASTER_PORT.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from lockstep.cluster.address import shown
from lockstep.cluster.spec import ClusterSpec, given_job_id
from lockstep.cluster.variables import LAST_PORT, chief_at, require_variables, whole_number
from lockstep.errors import ClusterError

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")

# SLURM's own limit (MAX_RANGE in its hostlist.c): what is longer is taken for a slip, not expanded.
_MOST_HOSTS = 65536


def expand_hosts(text: str) -> tuple[str, ...]:
    """Every host of a list, in its order.

    Raises:
        ClusterError: an empty list or item, a bracket that is not closed, no range in one, a range that falls.
    """
    hosts = tuple(itertools.islice(_hosts(text), _MOST_HOSTS + 1))
    if len(hosts) > _MOST_HOSTS:
        raise ClusterError(f"{shown(text)} names more than {_MOST_HOSTS} hosts; name those of this job alone")
    return hosts


def _hosts(text: str) -> Iterator[str]:
    position, text = 0, text.strip()
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _unreadable(text, text[position:] or "its end")
        yield from _expand_item(text, item[0])
        position = item.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise _unreadable(text, text[position:])
        position += 1


def _expand_item(text: str, item: str) -> Iterator[str]:
    choices = [
        [part[2]] if part[2] else [number for one in part[1].split(",") for number in _numbers(text, one)]
        for part in _PARTS.finditer(item)
    ]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(text: str, one: str) -> Iterator[str]:
    match = _RANGE.fullmatch(one)
    if match is None:
        raise _unreadable(text, one)
    first, last = match[1], match[2] or match[1]
    if not 0 <= int(last) - int(first) < _MOST_HOSTS:
        raise _unreadable(text, one)
    return (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _unreadable(text: str, part: str) -> ClusterError:
    return ClusterError(f"{shown(text)} is no list of hosts, at {shown(part)}; for example 'node[01-03,07],login1'")


_SOURCE = "SLURM"
_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_REMEDY = "srun sets them for every task: start the workers with `srun python train.py` inside the job"

# Ids from here up are SLURM's own steps (slurm.h: interactive 0xfffffffa, batch 0xfffffffb ...): a shell, no worker.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Above the ports of common services, below Linux's ephemeral ones (from 32768). Steps of a job, which may share a host,
# lie far apart, and so do jobs that follow each other.
_FIRST_PORT, _PORTS, _STRIDE = 15000, 15000, 7919


def is_job_step(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task that ``srun`` started, and not a batch script or an interactive shell."""
    step = environment.get("SLURM_STEP_ID", "")
    special = step.isascii() and step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return bool(environment.get("SLURM_STEP_NUM_TASKS")) and not special


def parse_slurm(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that a job step's variables declare; None outside one.

    Raises:
        ClusterError: some are missing, no numbers, out of range, or a list of hosts that cannot be read.
    """
    if not is_job_step(environment):
        return None
    require_variables(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID"), _SOURCE, _REMEDY)
    size = whole_number(environment, "SLURM_STEP_NUM_TASKS", _SOURCE, least=1)
    job = whole_number(environment, "SLURM_JOB_ID", _SOURCE, least=0)
    step = whole_number(environment, "SLURM_STEP_ID", _SOURCE, least=0) if environment.get("SLURM_STEP_ID") else 0
    return ClusterSpec(
        workers=(_chief(environment, job, step), *[""] * (size - 1)),
        index=whole_number(environment, "SLURM_PROCID", _SOURCE, least=0, most=size - 1),
        job_id=given_job_id(environment) or f"slurm-{job}.{step}",
        source=_SOURCE,
        attempt=_restarts(environment),
    )


def step_port(job: int, step: int) -> int:
    """The port of a job step's store, from 15000 to 29999: equal on all its tasks without a word between them."""
    return _FIRST_PORT + (job + _STRIDE * step) % _PORTS


def _chief(environment: Mapping[str, str], job: int, step: int) -> str:
    port = step_port(job, step)
    if environment.get("MASTER_PORT"):
        port = whole_number(environment, "MASTER_PORT", _SOURCE, least=1, most=LAST_PORT)
    if environment.get("MASTER_ADDR"):
        return chief_at(environment["MASTER_ADDR"], port, "MASTER_ADDR", _SOURCE)
    name = next((name for name in _HOST_LISTS if environment.get(name)), None)
    if name is None:
        raise ClusterError(f"{_SOURCE}: none of {', '.join(_HOST_LISTS)} and MASTER_ADDR is set; {_REMEDY}")
    return chief_at(_host_of_task_0(environment, name), port, name, _SOURCE)


def _host_of_task_0(environment: Mapping[str, str], name: str) -> str:
    """The first host of a list, but under ``srun --distribution=arbitrary``, whose order the list does not have."""
    try:
        hosts = expand_hosts(environment[name])
    except ClusterError as error:
        raise ClusterError(f"{_SOURCE}: {name}: {error}") from None
    if len(hosts) > 1 and environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ClusterError(
            f"{_SOURCE}: SLURM_DISTRIBUTION=arbitrary does not say which of {shown(environment[name])} has task 0; set "
            "MASTER_ADDR to the first host of the file in SLURM_HOSTFILE, or leave out --distribution=arbitrary"
        )
    return hosts[0]


def _restarts(environment: Mapping[str, str]) -> int:
    """How often SLURM put the job in the queue again: its id stays the same."""
    if not environment.get("SLURM_RESTART_COUNT"):
        return 0
    return whole_number(environment, "SLURM_RESTART_COUNT", _SOURCE, least=0)
