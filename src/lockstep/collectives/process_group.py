"""Process groups of ``torch.distributed`` between workers, whose waits end when a worker is lost.

Every purpose has a group of its own, and a wait checks the membership four times a second. NCCL waits in a kernel that
the host cannot interrupt. So the members of an NCCL group connect when it is made, and the membership aborts its
kernels when a worker is lost; torch's own watchdog, with a longer timeout than ours, is the last resort.
"""

from __future__ import annotations

import atexit
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
from lockstep.collectives.gloo_sums import TreeSum, TreeSums
from lockstep.collectives.sum_order import Node
from lockstep.errors import CollectiveError
from lockstep.membership.membership import Membership

Work = dist.Work | TreeSum
"""An operation in flight."""
SHARE_UNANSWERED = 0.35
"""The share of ``lost_after_s`` for which a connection may stay without an acknowledgement; the rest of the time is for
finding out what was lost."""
CHECK_EVERY = timedelta(milliseconds=250)
EXTRA_TIMEOUT = timedelta(seconds=5)
"""How much longer torch's timeouts are than ours: we know which worker is missing."""
# NCCL's wait only queues behind the kernel, so ``is_done`` asks at this interval whether it has ended.
_POLL_EVERY_S = 0.0005
_END_LIMIT_S = 10.0
_OPEN_FILES = Path("/proc/self/fd")


class ProcessGroup:
    """A process group for one purpose. Operations start at once, and ``wait`` completes them.

    Args:
        name: equal on all members, and different from that of any other group of theirs.
        gpu: this worker's GPU, for NCCL; None for gloo, in host memory.
        timeout_s: the longest wait while all workers are alive.
        members: the ranks of the members, ascending; None for all workers.
        nodes: the nodes of each member's replicas, for a group that sums; see ``start_sum``.
    """

    def __init__(
        self,
        membership: Membership,
        name: str,
        *,
        gpu: torch.device | None = None,
        timeout_s: float,
        members: Sequence[int] | None = None,
        nodes: Sequence[Sequence[Node]] = (),
    ) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        joined = tuple(range(membership.spec.num_workers) if members is None else members)
        store = membership.store(f"group/{name}")
        rank, size = joined.index(membership.spec.index), len(joined)
        self._nccl = gpu is not None
        self._rank, self._nodes = rank, nodes
        self._sums: TreeSums | None = None
        self._connections: GroupConnections | None = None
        self._in_flight = 0
        self._aborted = False
        timeout = timedelta(seconds=timeout_s) + EXTRA_TIMEOUT

        def connect() -> Any:
            if gpu is not None:
                return connect_nccl(store, rank, size, timeout=timeout, gpu=gpu)
            backend, self._connections = connect_gloo(membership, store, rank, size, timeout=timeout)
            return backend

        # In another thread: with a worker that has stopped since it joined, this would block for ``timeout_s``.
        self._backend: Any = membership.run_with_watchdog(connect, "the making of a process group")
        keep_alive(self._backend)
        # Weak: the membership outlives the group, and would keep it, its threads and its sockets.
        membership.subscribe(partial(_abort, ref(self)))
        self._at_exit = partial(_end_with_interpreter, ref(self))
        atexit.register(self._at_exit)

    def start_sum(self, parts: Sequence[torch.Tensor]) -> Work:
        """Starts a sum over the replicas of all members.

        Args:
            parts: for each node of this member's replicas a flat, contiguous tensor, of one length and dtype on all.
                They are written to: afterwards the first one is the sum. gloo's is in the order of ``sum_order``,
                NCCL's in an order of its own.

        Raises ClusterError if the connection to another worker has broken already.
        """
        if not self._nccl:
            self._in_flight += 1
            try:
                return self._tree_sums.start(parts)
            except RuntimeError as error:
                raise self._membership.explain_broken(error, "the start of a sum") from error
        # NCCL adds in an order of its own anyway, so the local parts are added here, and one tensor is sent.
        first, *rest = parts
        for addend in rest:
            first.add_(addend)
        return self._started(self._backend.allreduce([first]))

    def sum(self, parts: Sequence[torch.Tensor], waiting_in: str) -> None:
        """``start_sum`` and ``wait``, once all members are known to be in this call."""
        if self._nccl:
            self.wait(self.start_sum(parts), waiting_in)
            return
        self._in_flight += 1
        try:
            # Unlike ``wait`` it does not look at the membership: ``abort`` breaks the connections when one is lost.
            self._tree_sums.sum(parts)
        except RuntimeError as error:
            raise self._membership.explain_broken(error, waiting_in) from error
        self._in_flight -= 1

    def start_all_gather(self, tensor: torch.Tensor, into: Sequence[torch.Tensor]) -> Work:
        """Starts to write every member's tensor into ``into``; all have one shape."""
        return self._started(self._backend.allgather([list(into)], [tensor]))

    def start_broadcast(self, tensor: torch.Tensor) -> Work:
        """Starts to write the first member's ``tensor`` into those of all, in place."""
        return self._started(self._backend.broadcast([tensor], dist.BroadcastOptions()))

    def wait(self, work: Work, waiting_in: str) -> None:
        """Waits until ``work`` is done; to be called once for each operation.

        Raises ClusterError if another worker was lost or has failed, CollectiveError after ``timeout_s``.
        """
        limit = time.monotonic() + self._timeout_s
        while not self._is_done(work, waiting_in):
            self._membership.check()
            if time.monotonic() > limit:
                statuses = self._membership.describe_other_statuses()
                where = statuses or "all of them wait in it, and the network between them is cut"
                raise CollectiveError(
                    f"nothing came for {self._timeout_s:g} s in {waiting_in}, though all workers are alive: {where}; "
                    "make the same calls in the same order on every worker, or raise timeout_s of CommunicationOptions"
                )
        # NCCL's work counts as completed after an abort, with a sum that is incomplete
        # (tests/collectives/test_nccl.py: test_sums_that_an_abort_ended_are_not_taken_for_sums).
        if self._aborted:
            self._membership.check()
        self._in_flight -= 1

    def close(self) -> None:
        """Ends the connections. If an operation is still in flight, they stay until the process ends."""
        # A group with an operation in flight would wait for it; one that was aborted is left to the end of the process.
        if self._backend is None or self._in_flight or self._aborted:
            return
        atexit.unregister(self._at_exit)
        if self._sums is not None:
            self._sums.close()
        if self._connections is not None:
            self._connections.forget()
        if not self._nccl or ends_in_time(self._backend.shutdown):
            release(self._backend)
        self._backend = None

    def abort(self) -> None:
        """Ends what waits for other workers: NCCL's kernels, and the thread that adds up the parts of gloo's sums.

        Others wait for a gloo group in ``wait``, which notices a loss by itself.
        """
        if self._nccl and self._backend is not None:
            self._aborted = True
            abort([self._backend])
        elif self._sums is not None and self._connections is not None:
            self._connections.shut_down()

    def end_with_interpreter(self) -> None:
        """Ends the thread of sums in flight: in a wait of gloo, the end of the interpreter would abort the process."""
        if self._sums is not None:
            if self._in_flight and self._connections is not None:
                self._connections.shut_down()
            self._sums.close()

    @property
    def _tree_sums(self) -> TreeSums:
        if self._sums is None:
            self._sums = TreeSums(self._backend, self._rank, self._nodes)
        return self._sums

    def _started(self, work: Work) -> Work:
        self._in_flight += 1
        return work

    def _is_done(self, work: Work, waiting_in: str) -> bool:
        try:
            if self._nccl:
                return is_done(work, CHECK_EVERY)
            work.wait(CHECK_EVERY)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        # It has failed, or has completed right after the wait above had timed out. A second wait tells which.
        try:
            work.wait()
        except RuntimeError as error:
            raise self._membership.explain_broken(error, waiting_in) from error
        return True


def _abort(group: ref[ProcessGroup], _: BaseException) -> None:
    living_group = group()
    if living_group is not None:
        living_group.abort()


def _end_with_interpreter(group: ref[ProcessGroup]) -> None:
    living_group = group()
    if living_group is not None:
        living_group.end_with_interpreter()


def connect_gloo(
    membership: Membership, store: Store, rank: int, size: int, *, timeout: timedelta
) -> tuple[Any, GroupConnections]:
    """A gloo backend and its connections, which break when the network between two workers is lost."""
    backend = gloo_group(store, rank, size, address=membership.address, timeout=timeout)
    return backend, GroupConnections(store, rank, size, membership.lost_after_s * SHARE_UNANSWERED)


def connect_nccl(store: Store, rank: int, size: int, *, timeout: timedelta, gpu: torch.device) -> Any:
    """An NCCL backend whose members have all connected. It may hang; call it with a watchdog."""
    # NCCL connects on the current GPU of the calling thread, and a watchdog calls this in a thread of its own.
    torch.cuda.set_device(gpu)
    backend = nccl_group(store, rank, size, timeout=timeout)
    backend.eager_connect_single_device(gpu)
    return backend


def keep_alive(backend: Any) -> None:
    """Keeps a backend until ``release``: its destructor waits for operations in flight, for hours if a member died."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def release(backend: Any) -> None:
    """Ends ``keep_alive``."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(backend))


def is_done(work: Work, within: timedelta) -> bool:
    """Whether an operation completes within that time. The calling thread's later work is queued behind it."""
    until = time.monotonic() + within.total_seconds()
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_EVERY_S)
    work.wait()
    return True


def abort(backends: Sequence[Any]) -> None:
    """Ends the kernels of NCCL groups that wait for a lost worker. It does not wait; call it from any thread."""

    def abort_each() -> None:
        for backend in backends:
            with suppress(RuntimeError):  # ended already, for example by torch's watchdog
                backend.abort()

    # In a thread: an abort may wait for the kernels, and the callers must not.
    threading.Thread(target=abort_each, name="lockstep-abort", daemon=True).start()


def ends_in_time(end: Callable[[], None]) -> bool:
    """Calls ``end``, which ends idle groups; False if it does not return in time, because others have not ended."""
    thread = threading.Thread(target=end, name="lockstep-end", daemon=True)
    thread.start()
    thread.join(_END_LIMIT_S)
    return not thread.is_alive()


class GroupConnections:
    """The TCP connections of a gloo group that has just been made. Linux only; elsewhere it is empty.

    Where two workers cannot reach each other but both reach the chief, both still send heartbeats, and gloo would wait
    for hours. So these connections break after ``seconds`` without an acknowledgement; ``shut_down`` breaks them at
    once. gloo does not expose its sockets, but each member publishes the address on which it listens in the store: a
    connection is the group's if it is at this worker's address, or leads to another member's.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._sockets: list[socket.socket] = []
        # Linux has the option and lists a process's sockets in /proc; elsewhere gloo's own time limit has to do.
        if not hasattr(socket, "TCP_USER_TIMEOUT") or not _OPEN_FILES.is_dir():
            return
        local = _published(store, rank)
        peers = [_published(store, peer) for peer in range(size) if peer != rank]
        for connection in _tcp_sockets():
            if _connects(connection, local, peers):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
                self._sockets.append(connection)
            else:
                connection.close()

    def shut_down(self) -> None:
        """Breaks all of them at once."""
        for connection in self._sockets:
            with suppress(OSError):  # broken already
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes our duplicates, so that gloo alone owns the connections again. Idempotent."""
        while self._sockets:
            self._sockets.pop().close()


def _published(store: Store, rank: int) -> bytes:
    """What a member has published in the store, its address included."""
    key = f"0/{rank}"  # of gloo's first device; a group has one
    return bytes(store.get(key)) if store.check([key]) else b""


def _connects(connection: socket.socket, local: bytes, peers: list[bytes]) -> bool:
    try:
        local_address, peer_address = (
            _sockaddr(connection.family, address) for address in (connection.getsockname(), connection.getpeername())
        )
    except OSError:  # it listens, or is closed already
        return False
    return local_address in local or any(peer_address in published for published in peers)


def _sockaddr(family: int, address: tuple[str, int]) -> bytes:
    """An address as a kernel's ``sockaddr``, up to the end of the IP address."""
    host, port = address[:2]
    head = struct.pack("=H", family) + struct.pack("!H", port)
    return head + (b"" if family == socket.AF_INET else bytes(4)) + socket.inet_pton(family, host.partition("%")[0])


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each open TCP socket of the process, less those that another thread closes meanwhile."""
    # gloo gives no access to its sockets, so all of the process are looked through.
    for path in list(_OPEN_FILES.iterdir()):
        with suppress(OSError):
            if not str(path.readlink()).startswith("socket:"):
                continue
            # A duplicate: a socket object closes its descriptor, and this one is gloo's.
            number = os.dup(int(path.name))
            try:
                duplicate = socket.socket(fileno=number)
            except OSError:  # another file by now
                os.close(number)
                continue
            if duplicate.type == socket.SOCK_STREAM and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate
            else:
                duplicate.close()
