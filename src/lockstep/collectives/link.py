"""Process groups of ``torch.distributed`` between workers, with waits that are watched.

A group of our own for every purpose: the messages of one cannot be taken for those of another, and the user's own
process groups, if any, are left alone. A wait looks four times a second whether another worker has been lost.
``collectives.nccl`` has what is peculiar to groups of GPUs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.collectives import nccl
from lockstep.collectives.connections import SHARE_UNANSWERED, GroupConnections
from lockstep.errors import CollectiveError
from lockstep.membership.membership import Membership

LOOK_EVERY = timedelta(milliseconds=250)
_GLOO_THREADS = 2


class Group:
    """Workers, all or some, joined for one purpose. Operations start at once, and are completed by ``wait``.

    Args:
        membership: the job.
        name: equal on all its workers, and no other group's of any of them.
        gpu: move tensors with NCCL, from and to this GPU of this worker; None is gloo, in host memory.
        timeout_s: how many seconds a worker waits for one that is alive and does not come.
        members: the numbers of the workers to join, ascending; None is all.
    """

    def __init__(
        self,
        membership: Membership,
        name: str,
        *,
        gpu: torch.device | None = None,
        timeout_s: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        joined = tuple(range(membership.spec.num_workers) if members is None else members)
        store = membership.store(f"group/{name}")
        rank, size = joined.index(membership.spec.index), len(joined)
        self._nccl = gpu is not None
        self._under_way = 0
        self._broken_off = False
        # In a thread of its own: with a worker that was stopped since the roll call it would hang for ``timeout_s``.
        self._backend: Any = membership.watched(
            lambda: (
                _gloo(store, rank, size, timeout_s, membership)
                if gpu is None
                else nccl.connect(store, rank, size, timeout_s=timeout_s, gpu=gpu)
            ),
            "the making of a process group",
        )
        # The destructor of a group with an operation under way waits for that, for hours if its partner has died. So
        # nothing may delete this one before ``close``, the end of the interpreter included.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        if self._nccl:
            membership.subscribe(partial(_break_off, ref(self)))

    def start_sum(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to add up ``tensor``, dense and contiguous, in place, over all workers."""
        return self._started(self._backend.allreduce([tensor]))

    def start_gather(self, tensor: torch.Tensor, into: Sequence[torch.Tensor]) -> dist.Work:
        """Begins to write every worker's tensor into ``into``, all of one shape."""
        return self._started(self._backend.allgather([list(into)], [tensor]))

    def start_broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to write the chief's ``tensor`` into those of all, in place."""
        return self._started(self._backend.broadcast([tensor], dist.BroadcastOptions()))

    def wait(self, work: dist.Work, waiting_in: str) -> None:
        """Waits until ``work`` is done. Each is waited for once.

        Raises:
            ClusterError: another worker was lost or has failed.
            CollectiveError: it took longer than ``timeout_s``.
        """
        limit = time.monotonic() + self._timeout_s
        while not self._done(work, waiting_in):
            self._membership.check()
            if time.monotonic() > limit:
                where = self._membership.elsewhere() or "all of them wait in it, and the network between them is cut"
                raise CollectiveError(
                    f"nothing came for {self._timeout_s:g} s in {waiting_in}, though all workers are alive: {where}; "
                    "every worker must make the same calls in the same order, or timeout_s of CommunicationOptions be"
                    " longer"
                )
        if self._broken_off:
            self._membership.check()  # what has come is no sum
        self._under_way -= 1

    def close(self) -> None:
        """Ends the group's connections, unless an operation is still under way: then only the process ends them."""
        if self._backend is None or self._under_way or self._broken_off:
            return
        if not self._nccl or nccl.ends_in_time(self._backend.shutdown):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._backend))
        self._backend = None

    def break_off(self) -> None:
        """Ends what waits for other workers on this one's GPU; where hosts wait, ``wait`` sees by itself."""
        if self._nccl and self._backend is not None:
            self._broken_off = True
            nccl.abort([self._backend])

    def _started(self, work: dist.Work) -> dist.Work:
        self._under_way += 1
        return work

    def _done(self, work: dist.Work, waiting_in: str) -> bool:
        try:
            if self._nccl:
                return nccl.is_done(work, LOOK_EVERY)
            work.wait(LOOK_EVERY)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # it broke, or was done right after the wait before had given up
        except RuntimeError as error:
            raise self._membership.explain_broken(error, waiting_in) from error
        return True


def _gloo(store: Store, rank: int, size: int, timeout_s: float, membership: Membership) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo listens on the address of the machine's host name, whatever that is.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=membership.address)]
    options._threads = _GLOO_THREADS
    options._timeout = timedelta(seconds=timeout_s) + nccl.IS_LATER
    made = dist.ProcessGroupGloo(store, rank, size, options)
    GroupConnections(store, rank, size, membership.lost_after_s * SHARE_UNANSWERED).forget()
    return made


def _break_off(group: ref[Group], _: BaseException) -> None:
    here = group()
    if here is not None:
        here.break_off()
