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

_OPEN_FILES = Path("/proc/self/fd")


@contextmanager
def broken_after(seconds: float) -> Iterator[None]:
    """Connections that are opened in the block break if for so long nothing that was sent is acknowledged.

    gloo does not show its sockets, so they are told by being new. Linux only; elsewhere nothing is done.
    """
    before = _sockets()
    yield
    for number in _sockets() - before:
        # Somebody else's, closed again meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(number[0])) as opened:
            if opened.type == socket.SOCK_STREAM and opened.family in (socket.AF_INET, socket.AF_INET6):
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


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
