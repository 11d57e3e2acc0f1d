"""Stores that listen on the address that they are named by. torch's own launcher lets them listen on all interfaces."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from lockstep.errors import ClusterError

LOOPBACK = "127.0.0.1"
_BACKLOG = 512


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` alone.

    Args:
        host: a name or an address of this machine.
        port: 0 for any that is free.

    Raises:
        ClusterError: the port is taken, or the address is not one of this machine's.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ClusterError(
            f"cannot listen on {host}:{port}: {error.strerror}; expected a free port of an address of this machine:"
            " end the program that has it, or name another port"
        ) from error


def serve_store(listener: socket.socket, *, timeout_s: float) -> TCPStore:
    """A store served on ``listener``, which it takes over.

    Args:
        listener: what ``listen`` gave.
        timeout_s: seconds that a reader waits for a key.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, None, True, timedelta(seconds=timeout_s), False, master_listen_fd=listener.detach())
