"""The cores of a host that several workers share, divided among them: each would take all of them for its own.

Launchers divide them with OMP_NUM_THREADS. Workers that are started by hand, as with TF_CONFIG, have nobody who does;
two of them on two cores took 12 times as long for a step as with the cores divided.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


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
