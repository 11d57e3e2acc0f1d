"""How long the TCP connections of a process group wait for an answer that the network no longer carries.

Where two workers cannot reach each other but both reach the chief, both still beat, and gloo waits for hours. The
kernel knows better: what it sent is never acknowledged. A slow link is no such case, for there something always is.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch._C._distributed_c10d import Store

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
