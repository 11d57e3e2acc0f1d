"""Where a job's store is: the chief serves torch's ``TCPStore`` on its own address, and everybody reaches it there.

It listens on the one address that the cluster names, never on all of a machine's.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from lockstep.cluster.address import join_address
from lockstep.errors import ClusterError
from lockstep.membership.line import StoreBrokenError
from lockstep.membership.occupant import describe_occupant

_BACKLOG = 1024
_PROBE_S = 2.0
_CONNECT_S = 5.0
# Of a worker that has joined, to a store that it has reached before: busy machines have taken more than 5 s.
_CONNECT_AGAIN_S = 30.0


class PortTakenError(ClusterError):
    """Somebody listens already where the chief is to serve the store."""


class NotHereError(ClusterError):
    """As far as this machine knows now, the address at which the store is to be served is none of its own."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How this process reaches the store.

    Args:
        host: the IP address that answered.
        port: its port.
        own_host: this process's IP address on that connection.
    """

    host: str
    port: int
    own_host: str

    def connect(self) -> Store:
        """A client of its own connection."""
        return TCPStore(self.host, self.port, None, False, timedelta(seconds=_CONNECT_AGAIN_S), False)


def bind_to(host: str, port: int, who: str) -> socket.socket:
    """A socket that listens at ``port`` of this machine's address ``host``; the caller must close it.

    Args:
        host: a name or an IP address.
        port: 0 for any that is free.
        who: what listens there, for messages: "worker 0 (hosta:20000)".

    Raises:
        PortTakenError: another program listens there.
        NotHereError: the host cannot be looked up, or is not this machine.
        ClusterError: the port cannot be had.
    """
    failure: OSError | None = None
    for family, address in _look_up(host, port, who):
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(_BACKLOG)  # or another process, at the same moment, could bind the address too
            return bound
        except OSError as error:
            bound.close()
            failure = error
    raise _explain_bind(failure, host, port, who)


def serve(listener: socket.socket) -> Store:
    """Serves the store on a listening socket, which it takes over, for as long as the returned object lives."""
    host, port = listener.getsockname()[:2]
    limit = timedelta(seconds=_CONNECT_S)
    # Without a socket handed in, TCPStore listens on all of the machine's addresses.
    return TCPStore(host, port, None, True, limit, False, master_listen_fd=listener.detach())


def find_route(host: str, port: int) -> Route:
    """Connects once to the store's address, to find out whether it answers and by which addresses.

    torch's client would try for itself, and print a C++ traceback on stderr for each failure.

    Raises:
        StoreBrokenError: it does not answer.
    """
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S) as probe:
            return Route(host=probe.getpeername()[0], port=port, own_host=probe.getsockname()[0])
    except socket.gaierror as error:
        raise StoreBrokenError(f"the name {host!r} cannot be looked up ({error.strerror})") from None
    except TimeoutError:
        raise StoreBrokenError(f"{join_address(host, port)} does not answer") from None
    except OSError as error:
        raise StoreBrokenError(f"{join_address(host, port)}: {error.strerror or error}") from None


def _look_up(host: str, port: int, who: str) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotHereError(
            f"the host of {who} cannot be looked up ({error.strerror}); name it by an address that resolves here"
        ) from None
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


def _explain_bind(failure: OSError | None, host: str, port: int, who: str) -> ClusterError:
    code = failure.errno if failure else None
    if code == errno.EADDRINUSE:
        return PortTakenError(
            f"{who} cannot listen: port {port} of {host} is in use by {describe_occupant(port) or 'another program'}; "
            "end that one, choose another port, or give this process an index of its own if that is this worker already"
        )
    if code == errno.EADDRNOTAVAIL:
        return NotHereError(
            f"{who} cannot listen: {host} is not an address of this machine ({socket.gethostname()}); "
            "start it where that address is, or correct the cluster or this process's index"
        )
    if code == errno.EACCES:
        return ClusterError(f"{who} cannot listen: port {port} needs privileges; choose one above 1023")
    return ClusterError(f"{who} cannot listen at {join_address(host, port)}: {failure}")
