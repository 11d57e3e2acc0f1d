"""Where a job's store is: the chief serves torch's ``TCPStore`` on its own address, and everybody reaches it there.

It listens on the one address that the cluster names, never on all of a machine's.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store, TCPStore

from lockstep.cluster.address import join_address
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError, LockstepError
from lockstep.membership.failure_report import Ending, read_ending

_LISTENING = "0A"
_LONGEST_COMMAND = 80


def describe_occupant(port: int, proc: Path = Path("/proc")) -> str:
    """ "process 4242 (python train.py)", or an empty text where it is another user's, or the machine has no /proc."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    for process in sorted(proc.glob("[0-9]*")) if sockets else ():
        if any(link in sockets for link in _open_files(process)):
            return f"process {process.name}{_command(process)}"
    return ""


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _open_files(process: Path) -> Iterator[str]:
    try:
        for file in (process / "fd").iterdir():
            yield str(file.readlink())
    except OSError:  # it has ended, or is another user's
        return


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f" ({words[:_LONGEST_COMMAND]})" if words else ""


T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]

_END_LIMIT_S = 1.0


class StoreBrokenError(Exception):
    """The connection to the store has ended, or could not be made: its server is gone, or something between."""


class StoreSilentError(Exception):
    """The store did not answer within the time given."""


class Line:
    """A store client and the one thread that uses it.

    Args:
        connect: makes the client; called in the thread, before the first call.
        name: the thread's name.
    """

    def __init__(self, connect: Callable[[], Store], name: str = "lockstep-store") -> None:
        self._calls: _Calls = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the interpreter from ending.
        self._thread = threading.Thread(target=_work, args=(connect, self._calls), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[Store], T]) -> Future[T]:
        """Has ``call`` made after those before it; ``StoreBrokenError`` in its future means a lost connection."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def call(self, call: Callable[[Store], T], limit_s: float) -> T:
        """Has ``call`` made and waits for what it returns.

        Raises:
            StoreBrokenError: the connection has ended.
            StoreSilentError: no answer within ``limit_s`` seconds; it may come yet, and what was asked be done.
        """
        try:
            return self.submit(call).result(max(0.0, limit_s))
        except TimeoutError:
            raise StoreSilentError(f"no answer within {limit_s:.3g} s") from None

    def close(self) -> None:
        """Ends the thread. One that hangs in a call is left alone, and ends with the interpreter. Idempotent."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_END_LIMIT_S)


def _work(connect: Callable[[], Store], calls: _Calls) -> None:
    store: Store | None = None
    while True:
        item = calls.get()
        if item is None:
            return
        call, future = item
        try:
            if store is None:
                store = connect()
            future.set_result(call(store))
        except (LockstepError, StoreBrokenError) as error:
            future.set_exception(error)
        except RuntimeError as error:  # torch's DistError, and what its C++ raises beside
            future.set_exception(StoreBrokenError(str(error).partition("\n")[0]))
        del item, call, future


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


OWNER_KEY = "lockstep/job"
REFUSED_KEY = "lockstep/refused"


@dataclass(frozen=True)
class Place:
    """Where one run of a job lies in the store.

    Args:
        prefix: before all its keys.
    """

    prefix: str

    @property
    def complete(self) -> str:
        """The key of all cards."""
        return f"{self.prefix}/complete"

    @property
    def ending(self) -> str:
        """The key of the cause of its end."""
        return f"{self.prefix}/ending"

    def seat(self, index: int) -> str:
        """The key of a worker's card."""
        return f"{self.prefix}/seat/{index}"

    def beat(self, index: int) -> str:
        """The key of a worker's status."""
        return f"{self.prefix}/beat/{index}"

    def end(self, store: Store, ending: Ending) -> Ending:
        """Writes why the run ends, unless somebody has already; the cause that stands there then."""
        return read_ending(store.compare_set(self.ending, "", ending.to_text()).decode())


def run_key(spec: ClusterSpec) -> str:
    """The key of how often this attempt of the job has been opened."""
    return f"lockstep/{spec.job_id}/{spec.attempt}/run"


def place_of(spec: ClusterSpec, run: str) -> Place:
    """Where a run of this attempt of the job lies."""
    return Place(f"lockstep/{spec.job_id}/{spec.attempt}/{run}")


def read(store: Store, key: str) -> str:
    """What stands at ``key``, or an empty text; never waits for it to be written, as ``get`` does."""
    return store.compare_set(key, "", "").decode()
