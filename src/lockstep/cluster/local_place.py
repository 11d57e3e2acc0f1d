"""Which of the workers of its host a process is, and so which of the GPUs that it sees are its own.

sees its own alone      lockstep run, srun --gpus-per-task: all that it sees
sees those of the host  torchrun, srun: an equal part, by its place among the host's workers
says nothing            one worker on this host: all that it sees
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.cluster.launched import whole_number
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

OWN_GPUS = "LOCKSTEP_OWN_GPUS"
"""Set by ``lockstep run`` and ``ls.launch`` for workers whom they show their own GPUs alone."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """A worker's place among those of its host.

    Args:
        index: from 0.
        workers: how many there are.
        sees_own: whether what this process sees of the host's GPUs is its own alone.
    """

    index: int = 0
    workers: int = 1
    sees_own: bool = False

    def own_gpus(self, gpus: int) -> range:
        """The numbers of this worker's, of ``gpus`` that it sees.

        Where there are fewer than workers, several have the same one, or each sees another: that only they all know.

        Example:
            >>> LocalPlace(index=1, workers=2).own_gpus(4)
            range(2, 4)
        """
        if self.sees_own or self.workers == 1 or not gpus:
            return range(gpus)
        each = max(1, gpus // self.workers)
        first = self.index * each % gpus
        return range(first, first + each)


def local_place(environment: Mapping[str, str], cluster: ClusterSpec | None) -> LocalPlace:
    """What the launcher says, or the addresses of the cluster. Pure.

    Args:
        environment: of the process.
        cluster: which it is a worker of; None where it is by itself.

    Raises:
        ClusterError: numbers that are none, or out of range.
    """
    if cluster is None or cluster.task != "worker" or cluster.num_workers == 1:
        return LocalPlace()
    if environment.get("LOCAL_RANK") and environment.get("LOCAL_WORLD_SIZE"):
        size = whole_number(environment, "LOCAL_WORLD_SIZE", cluster.source, least=1)
        rank = whole_number(environment, "LOCAL_RANK", cluster.source, least=0, most=size - 1)
        return LocalPlace(index=rank, workers=size, sees_own=bool(environment.get(OWN_GPUS)))
    if cluster.source == "SLURM":
        return _of_task(environment)
    return _by_address(environment, cluster)


def place_here(cluster: ClusterSpec | None) -> LocalPlace:
    """``local_place`` by this process's environment."""
    return local_place(os.environ, cluster)


def _of_task(environment: Mapping[str, str]) -> LocalPlace:
    if not environment.get("SLURM_LOCALID") or not environment.get("SLURM_STEP_TASKS_PER_NODE"):
        return LocalPlace()
    node = whole_number(environment, "SLURM_NODEID", "SLURM", least=0) if environment.get("SLURM_NODEID") else 0
    counts = _tasks(environment["SLURM_STEP_TASKS_PER_NODE"])
    size = counts[min(node, len(counts) - 1)]
    return LocalPlace(
        index=whole_number(environment, "SLURM_LOCALID", "SLURM", least=0, most=size - 1),
        workers=size,
        sees_own=bool(environment.get("SLURM_GPUS_PER_TASK")) or "gpu" in environment.get("SLURM_TRES_PER_TASK", ""),
    )


def _tasks(text: str) -> list[int]:
    """SLURM's short notation for the tasks of each host: "4(x2),3" is 4, 4, 3."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or not int(match[1]):
            raise ClusterError(f"SLURM: SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read; expected 4, or 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _by_address(environment: Mapping[str, str], cluster: ClusterSpec) -> LocalPlace:
    """TF_CONFIG and a ClusterSpec name every worker's host; who starts workers so shows each its own GPUs by hand."""
    hosts = [cluster.host(index) for index in range(cluster.num_workers)]
    own = hosts[cluster.index]
    if not own:
        return LocalPlace()
    return LocalPlace(
        index=Counter(hosts[: cluster.index])[own],
        workers=Counter(hosts)[own],
        sees_own=bool(environment.get("CUDA_VISIBLE_DEVICES")),
    )
