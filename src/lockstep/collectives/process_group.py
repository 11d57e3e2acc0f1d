"""torch's NCCL groups between workers, with every wait of the host bounded: made, waited for, broken off, ended.

NCCL waits for other workers in a kernel, which nothing that is queued behind it gets past, and no host can interrupt.
So the members of a group are brought together before anything depends on it, and when the membership finds that one has
been lost, its kernels are aborted. torch watches too, and ends a process whose NCCL fails or takes longer than the
group's time limit; that is the last resort, and later than our own waits.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from lockstep._torch_compat import Store, gloo_group, nccl_group
from lockstep.errors import CollectiveError
from lockstep.membership.membership import Membership

SHARE_UNANSWERED = 0.35
"""Of ``lost_after_s``: the rest is for finding out whether a worker has been lost, or the network between two."""
_OPEN_FILES = Path("/proc/self/fd")


class GroupConnections:
    """The TCP connections of a process group over gloo that has just been made. Linux only; elsewhere there are none.

    They break if for so long nothing that was sent is acknowledged, and can be shut down from outside: whoever waits
    for one in C++ gets an error then. gloo does not show its sockets. But each worker of a group listens at an address
    of its own, which all of them have written into the store: a connection that this worker has accepted is at its own
    address, and one that it has begun leads to another's. No other socket of the process is touched.

    Args:
        store: that of the group.
        rank: of this worker in it.
        size: how many workers it has.
        seconds: how long they wait.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._opened: list[socket.socket] = []
        if not hasattr(socket, "TCP_USER_TIMEOUT") or not _OPEN_FILES.is_dir():
            return
        own, *others = (_told(store, each) for each in (rank, *(each for each in range(size) if each != rank)))
        for opened in _tcp_sockets():
            if _is_between(opened, own, others):
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
                self._opened.append(opened)
            else:
                opened.close()

    def shut_down(self) -> None:
        """Breaks all of them, now."""
        for opened in self._opened:
            with suppress(OSError):  # broken already
                opened.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Leaves them to whoever opened them. Idempotent; until then the other side sees none of them closed."""
        while self._opened:
            self._opened.pop().close()


def _told(store: Store, rank: int) -> bytes:
    """What a worker has told the others about itself when the group was made, its address included."""
    key = f"0/{rank}"  # of gloo's first device; a group has one
    return bytes(store.get(key)) if store.check([key]) else b""


def _is_between(opened: socket.socket, own: bytes, others: list[bytes]) -> bool:
    """Whether a socket connects this worker with another one of the group."""
    try:
        here, there = opened.getsockname(), opened.getpeername()
    except OSError:  # it listens, or is closed already
        return False
    begun = _as_written(opened.family, there)
    return _as_written(opened.family, here) in own or any(begun in told for told in others)


def _as_written(family: int, address: tuple[str, int]) -> bytes:
    """An address as the kernel has it, a ``sockaddr`` up to the end of the host's number."""
    host, port = address[:2]
    head = struct.pack("=H", family) + struct.pack("!H", port)
    return head + (b"" if family == socket.AF_INET else bytes(4)) + socket.inet_pton(family, host.partition("%")[0])


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each that the process has open. What another thread closes meanwhile is passed over."""
    for path in list(_OPEN_FILES.iterdir()):
        with suppress(OSError):
            if not str(path.readlink()).startswith("socket:"):
                continue
            number = os.dup(int(path.name))
            try:
                opened = socket.socket(fileno=number)
            except OSError:  # another file by now
                os.close(number)
                continue
            if opened.type == socket.SOCK_STREAM and opened.family in (socket.AF_INET, socket.AF_INET6):
                yield opened
            else:
                opened.close()


LOOK_EVERY = timedelta(milliseconds=250)


class ProcessGroup:
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
        # In a thread of its own: with a worker that was stopped since the rendezvous it would hang for ``timeout_s``.
        self._backend: Any = membership.run_with_watchdog(
            lambda: (
                _gloo(store, rank, size, timeout_s, membership)
                if gpu is None
                else connect_nccl(store, rank, size, timeout_s=timeout_s, gpu=gpu)
            ),
            "the making of a process group",
        )
        # The destructor of a group with an operation under way waits for that, for hours if its partner has died. So
        # nothing may delete this one before ``close``, the end of the interpreter included.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        if self._nccl:
            membership.subscribe(partial(_break_off, ref(self)))

    def start_all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to add up ``tensor``, dense and contiguous, in place, over all workers."""
        return self._started(self._backend.allreduce([tensor]))

    def start_all_gather(self, tensor: torch.Tensor, into: Sequence[torch.Tensor]) -> dist.Work:
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
                where = (
                    self._membership.describe_other_statuses()
                    or "all of them wait in it, and the network between them is cut"
                )
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
        if not self._nccl or ends_in_time(self._backend.shutdown):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._backend))
        self._backend = None

    def break_off(self) -> None:
        """Ends what waits for other workers on this one's GPU; where hosts wait, ``wait`` sees by itself."""
        if self._nccl and self._backend is not None:
            self._broken_off = True
            abort([self._backend])

    def _started(self, work: dist.Work) -> dist.Work:
        self._under_way += 1
        return work

    def _done(self, work: dist.Work, waiting_in: str) -> bool:
        try:
            if self._nccl:
                return is_done(work, LOOK_EVERY)
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
    timeout = timedelta(seconds=timeout_s) + IS_LATER
    made = gloo_group(store, rank, size, address=membership.address, timeout=timeout)
    GroupConnections(store, rank, size, membership.lost_after_s * SHARE_UNANSWERED).forget()
    return made


def _break_off(group: ref[ProcessGroup], _: BaseException) -> None:
    here = group()
    if here is not None:
        here.break_off()


IS_LATER = timedelta(seconds=5)
"""How much longer torch's groups wait than we do, who know which worker does not come."""
LOOK_EVERY_S = 0.0005
_END_LIMIT_S = 10.0


def connect_nccl(store: Store, rank: int, size: int, *, timeout_s: float, gpu: torch.device) -> Any:
    """A group whose members, each with its GPU, have all been there. It may hang: call it watched."""
    torch.cuda.set_device(gpu)  # of the calling thread
    made = nccl_group(store, rank, size, timeout=timedelta(seconds=timeout_s) + IS_LATER)
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
