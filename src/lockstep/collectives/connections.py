"""How long the TCP connections of a process group wait for an answer that the network no longer carries.

Where two workers cannot reach each other but both reach the chief, both still beat, and gloo waits for hours. The
kernel knows better: what it sent is never acknowledged. A slow link is no such case, for there something always is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARE_UNANSWERED = 0.35
"""Of ``lost_after_s``: the rest is for finding out whether a worker has been lost, or the network between two."""
_OPEN_FILES = Path("/proc/self/fd")


class NewConnections:
    """The TCP connections that are opened in the ``with`` block. Linux only; elsewhere there are none.

    They break if for so long nothing that was sent is acknowledged, and can be shut down from outside: whoever waits
    for one in C++ gets an error then. gloo does not show its sockets, so they are told by being new.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._opened: list[socket.socket] = []

    def __enter__(self) -> NewConnections:
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        for number, _identity in _sockets() - self._before:
            with suppress(OSError):  # somebody else's, closed again meanwhile
                opened = socket.socket(fileno=os.dup(number))
                if opened.type == socket.SOCK_STREAM and opened.family in (socket.AF_INET, socket.AF_INET6):
                    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._seconds * 1000))
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


@contextmanager
def broken_after(seconds: float) -> Iterator[None]:
    """Connections that are opened in the block break if for so long nothing that was sent is acknowledged."""
    with NewConnections(seconds) as opened:
        yield
    opened.forget()


def _sockets() -> set[tuple[int, str]]:
    """The number and the identity of each open one."""
    if not hasattr(socket, "TCP_USER_TIMEOUT") or not _OPEN_FILES.is_dir():
        return set()
    found = set()
    for path in _OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):
            target = str(path.readlink())
            if target.startswith("socket:"):
                found.add((int(path.name), target))
    return found
