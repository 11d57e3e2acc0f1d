"""torch's NCCL groups between workers, with every wait of the host bounded: made, waited for, broken off, ended.

NCCL waits for other workers in a kernel, which nothing that is queued behind it gets past, and no host can interrupt.
So the members of a group are brought together before anything depends on it, and when the membership finds that one has
been lost, its kernels are aborted. torch watches too, and ends a process whose NCCL fails or takes longer than the
group's time limit; that is the last resort, and later than our own waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

IS_LATER = timedelta(seconds=5)
"""How much longer torch's groups wait than we do, who know which worker does not come."""
LOOK_EVERY_S = 0.0005
_END_LIMIT_S = 10.0


def connect(store: Store, rank: int, size: int, *, timeout_s: float, gpu: torch.device) -> Any:
    """A group whose members, each with its GPU, have all been there. It may hang: call it watched."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s) + IS_LATER
    torch.cuda.set_device(gpu)  # of the calling thread
    made = dist.ProcessGroupNCCL(store, rank, size, options)
    made.eager_connect_single_device(gpu)
    return made


def is_done(work: dist.Work, within: timedelta) -> bool:
    """Whether an operation completes in that time; what the calling thread queues then runs behind it."""
    until = time.monotonic() + within.total_seconds()
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_EVERY_S)
    work.wait()
    return True


def abort(backends: Sequence[Any]) -> None:
    """Ends the groups' kernels, which wait for a worker that has been lost. From any thread; it does not wait."""

    def each() -> None:
        for backend in backends:
            with suppress(RuntimeError):  # ended already, by torch's own watchdog say
                backend.abort()

    threading.Thread(target=each, name="lockstep-abort", daemon=True).start()


def ends_in_time(end: Callable[[], None]) -> bool:
    """Ends groups whose operations have all been waited for; False if others do not end theirs within seconds."""
    thread = threading.Thread(target=end, name="lockstep-end", daemon=True)
    thread.start()
    thread.join(_END_LIMIT_S)
    return not thread.is_alive()
