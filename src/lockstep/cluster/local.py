"""The cores of a host that several workers share, divided among them: each would take all of them for its own.

Launchers divide them with OMP_NUM_THREADS. Workers that are started by hand, as with TF_CONFIG, have nobody who does;
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

from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.variables import whole_number
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


def core_card() -> dict[str, int]:
    """What the workers of a job tell each other: which host this is, and which of its cores this process may use."""
    name = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    host = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    return {"host": host, "cores": sum(1 << core for core in os.sched_getaffinity(0))}


def sharing_cores(cards: Sequence[Mapping[str, int]], index: int) -> int:
    """How many workers compute on the cores of worker ``index``, itself among them. Pure.

    Args:
        cards: every worker's ``core_card``, in worker order.
        index: whose cores.
    """
    own = cards[index]
    return sum(card["host"] == own["host"] and bool(card["cores"] & own["cores"]) for card in cards)


def own_threads(environment: Mapping[str, str], *, threads: int, default: int, workers: int) -> int:
    """The number of intra-op threads for one of the workers that share cores. Pure.

    What was asked for stays: by OMP_NUM_THREADS, or by ``torch.set_num_threads`` with another number than torch's own.

    Args:
        environment: of the process.
        threads: how many it has now.
        default: the number that torch takes by itself.
        workers: that share the cores.
    """
    if workers == 1 or environment.get("OMP_NUM_THREADS") or threads != default:
        return threads
    return max(1, threads // workers)


def divide_cores(cards: Sequence[Mapping[str, int]], index: int) -> None:
    """Gives this process its part of the cores as intra-op threads, from now on.

    Args:
        cards: every worker's ``core_card``, in worker order.
        index: this worker.
    """
    threads = torch.get_num_threads()
    own = own_threads(os.environ, threads=threads, default=_torchs_number(), workers=sharing_cores(cards, index))
    if own != threads:
        torch.set_num_threads(own)


def _torchs_number() -> int:
    """One thread for each core that this process may use; MKL counts those that are two threads of a core once."""
    cores = os.sched_getaffinity(0)
    siblings = (Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores)
    whole = {path.read_text(encoding="ascii") for path in siblings if path.exists()}
    counts_whole = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return len(whole) if whole and counts_whole else len(cores)
