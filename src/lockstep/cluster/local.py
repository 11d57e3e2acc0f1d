"""A worker's part of its host: which GPUs that it sees are its own, and how many threads it uses.

It sees only its own GPUs           lockstep run, srun --gpus-per-task: all that it sees
It sees all GPUs of the host        torchrun, srun, mpirun: an equal part, by its rank among the host's workers
There is one worker on this host    all that it sees

Launchers divide the cores with OMP_NUM_THREADS. Nobody does for workers that are started by hand, as with TF_CONFIG:
two of them on two cores took 12 times as long for a step as with the cores divided.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.cluster.launcher_variables import local_numbers
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.variables import Variables
from lockstep.errors import ClusterError

OWN_GPUS = "LOCKSTEP_OWN_GPUS"
"""Set by ``lockstep run`` and ``ls.launch`` for workers that see only their own GPUs."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """A worker's rank among the workers of its host, and whether it sees only its own GPUs."""

    rank: int = 0
    workers: int = 1
    sees_own: bool = False

    def own_gpus(self, gpus: int) -> range:
        """The numbers of this worker's GPUs among the ``gpus`` that it sees.

        If there are fewer GPUs than workers, several workers have the same one, or each sees a different one.
        """
        if self.sees_own or self.workers == 1 or not gpus:
            return range(gpus)
        share = max(1, gpus // self.workers)
        # With fewer GPUs than workers the ranks wrap around: worker 2 of 3 on two GPUs takes GPU 0 again.
        first = self.rank * share % gpus
        return range(first, first + share)


def own_local_rank(cluster: ClusterSpec | None) -> LocalRank:
    """``find_local_rank`` with the environment of this process."""
    return find_local_rank(os.environ, cluster)


def find_local_rank(environment: Mapping[str, str], cluster: ClusterSpec | None) -> LocalRank:
    """The local rank by the launcher's variables or the cluster's addresses. Pure. A bad variable is a ClusterError."""
    if cluster is None or cluster.task != "worker" or cluster.num_workers == 1:
        return LocalRank()
    variables = Variables(environment, cluster.source)
    if variables.get("LOCAL_RANK") and variables.get("LOCAL_WORLD_SIZE"):
        size = variables.number("LOCAL_WORLD_SIZE", least=1)
        rank = variables.number("LOCAL_RANK", most=size - 1)
        return LocalRank(rank=rank, workers=size, sees_own=bool(variables.get(OWN_GPUS)))
    if cluster.source == "SLURM":
        return _slurm_local_rank(variables)
    if (numbers := local_numbers(environment, cluster.source)) is not None:
        return LocalRank(rank=numbers[0], workers=numbers[1], sees_own=bool(variables.get(OWN_GPUS)))
    # TF_CONFIG and a ClusterSpec name every worker's host. Whoever starts workers so sets CUDA_VISIBLE_DEVICES by hand.
    hosts = [cluster.host(index) for index in range(cluster.num_workers)]
    host = hosts[cluster.index]
    if not host:
        return LocalRank()
    sees_own = bool(variables.get("CUDA_VISIBLE_DEVICES"))
    return LocalRank(rank=Counter(hosts[: cluster.index])[host], workers=Counter(hosts)[host], sees_own=sees_own)


def _slurm_local_rank(variables: Variables) -> LocalRank:
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE")
    if not variables.get("SLURM_LOCALID") or not tasks:
        return LocalRank()
    counts: list[int] = []  # "4(x2),3" is 4, 4, 3
    for item in tasks.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or not int(match[1]):
            raise ClusterError(f"SLURM: SLURM_STEP_TASKS_PER_NODE={tasks!r} cannot be read; expected 4, or 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    size = counts[min(variables.count("SLURM_NODEID"), len(counts) - 1)]
    sees_own = bool(variables.get("SLURM_GPUS_PER_TASK")) or "gpu" in variables.get("SLURM_TRES_PER_TASK")
    return LocalRank(rank=variables.number("SLURM_LOCALID", most=size - 1), workers=size, sees_own=sees_own)


def core_info() -> dict[str, int]:
    """What the workers of a job tell each other about cores: a number for this host, and a bit mask of its cores."""
    # Machines made of one image may have one name; the kernel makes the boot id anew at each start.
    name = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    host = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    # The cores as bits of one number: ``info`` is a mapping to numbers, and a container may have any of the host's
    # cores.
    return {"host": host, "cores": sum(1 << core for core in os.sched_getaffinity(0))}


def divide_cores(infos: Sequence[Mapping[str, int]], index: int) -> None:
    """Sets the intra-op threads of worker ``index`` to its part of the cores, from every worker's ``core_info``."""
    threads = torch.get_num_threads()
    workers = count_core_sharers(infos, index)
    share = threads_per_worker(os.environ, threads=threads, default=_default_threads(), workers=workers)
    if share != threads:
        torch.set_num_threads(share)


def count_core_sharers(infos: Sequence[Mapping[str, int]], index: int) -> int:
    """How many workers, this one included, compute on the cores of worker ``index``. Pure."""
    worker = infos[index]
    return sum(info["host"] == worker["host"] and bool(info["cores"] & worker["cores"]) for info in infos)


def threads_per_worker(environment: Mapping[str, str], *, threads: int, default: int, workers: int) -> int:
    """The number of intra-op threads for one of the workers that share cores. Pure.

    A number that the user set is kept, whether by OMP_NUM_THREADS or by ``torch.set_num_threads``: then ``threads``,
    the current number, is not ``default``, the number that torch chooses by itself.
    """
    if workers == 1 or environment.get("OMP_NUM_THREADS") or threads != default:
        return threads
    return max(1, threads // workers)


def _default_threads() -> int:
    """One thread for each core that this process may use; with MKL, one for each physical core."""
    cores = os.sched_getaffinity(0)
    # MKL uses one thread for each physical core by itself, and torch's default follows it; the number is needed to tell
    # a default from a user's choice.
    siblings = (Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores)
    physical = {path.read_text(encoding="ascii") for path in siblings if path.exists()}
    counts_physical = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return len(physical) if physical and counts_physical else len(cores)
