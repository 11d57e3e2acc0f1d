"""The key-value store of a job: who serves it, how it is reached, its keys, and clients that cannot hang their callers.

The chief serves torch's ``TCPStore`` on the one address that the cluster names, never on all of a machine's addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import queue
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from lockstep._torch_compat import Store, TCPStore
from lockstep.cluster.spec import ClusterSpec, join_address
from lockstep.errors import ClusterError, LockstepError
from lockstep.membership.failure_report import FailureReport

T = TypeVar("T")

OWNER_KEY = "lockstep/job"
"""Which job the store belongs to. Every process reads it before it writes anything."""

# Connections of workers that start at the same moment wait in this queue until the store accepts them.
_BACKLOG = 1024
_PROBE_TIMEOUT_S = 2.0
# Busy machines have taken more than 5 s to accept a second connection.
_CONNECT_TIMEOUT = timedelta(seconds=60)
_CLOSE_TIMEOUT_S = 1.0
_OPEN_FILES = 65536


class StoreBrokenError(Exception):
    """The connection to the store has ended or could not be made."""


class StoreSilentError(Exception):
    """The store did not answer in time."""


class PortTakenError(ClusterError):
    """Another process listens already where the store is to be served."""


class UnknownHostError(ClusterError):
    """The name of the host where the store is to be served cannot be looked up now."""


class StoreKeys:
    """The keys of one run of a job.

    PREFIX/rank/0 ...        who came: the ``WorkerInfo`` of the last process that registered the rank
    PREFIX/heartbeat/0 ...   each worker's ``Heartbeat``, written again and again
    PREFIX/arrivals          the ranks in the order in which they were registered, each followed by a space
    PREFIX/missing           the names of the workers that the chief still waits for
    PREFIX/complete          all infos, once every rank is registered and all agree
    PREFIX/failure           the ``FailureReport``, if the run ended early; the first one is kept
    PREFIX/ended             the rank of the first worker that ended normally, a space, and its last status

    A worker's own keys are there from its registration on, and the others, empty at first, before anyone learns of the
    run. So nobody ever waits for a key, and one request reads several.
    """

    def __init__(self, spec: ClusterSpec, run: str) -> None:
        self.prefix = f"lockstep/{spec.job_id}/{spec.attempt}/{run}"
        self.arrivals, self.missing = f"{self.prefix}/arrivals", f"{self.prefix}/missing"
        self.complete, self.failure = f"{self.prefix}/complete", f"{self.prefix}/failure"
        self.ended = f"{self.prefix}/ended"

    def open(self, store: Store, info: str) -> None:
        """Prepares the run, as its chief, who registers with this ``info``."""
        for key in (self.arrivals, self.missing, self.complete, self.failure, self.ended):
            store.set(key, "")
        self.register(store, 0, info)

    def register(self, store: Store, rank: int, info: str) -> None:
        """Registers the process with this ``info`` as worker ``rank``, instead of any earlier one."""
        store.set(self.rank(rank), info)
        store.set(self.heartbeat(rank), "")
        store.append(self.arrivals, f"{rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it

    def rank(self, rank: int) -> str:
        return f"{self.prefix}/rank/{rank}"

    def heartbeat(self, rank: int) -> str:
        return f"{self.prefix}/heartbeat/{rank}"

    def write_failure(self, store: Store, report: FailureReport) -> FailureReport:
        """Writes why the run ends unless a report is there already; returns the report that is there then."""
        return FailureReport.from_json(store.compare_set(self.failure, "", report.to_json()).decode())


def run_key(spec: ClusterSpec) -> str:
    """The key that counts how often this attempt of the job was opened. Each run has keys of its own."""
    return f"lockstep/{spec.job_id}/{spec.attempt}/run"


def read(store: Store, key: str) -> str:
    """The value of ``key``, or an empty text. Unlike ``get`` it never waits for the key to be written."""
    # ``TCPStore.get`` waits until the key is there, up to its time limit; ``compare_set`` with two empty texts changes
    # nothing and answers at once.
    return store.compare_set(key, "", "").decode()


def read_all(store: Store, keys: Sequence[str]) -> list[str]:
    """The values of several keys, all of which must be there, by one request."""
    return [value.decode() for value in store.multi_get(list(keys))]


class StoreClient:
    """A client of the store with a thread of its own, so that a silent store cannot hang the caller.

    A call of torch's client blocks in C++ and keeps no time limit when the server is stopped or cut off, and it holds
    the client's lock meanwhile. The thread makes every call, the first one to ``connect``; the caller waits as long as
    it wants to.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._work, args=(connect,), name="lockstep-store", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[Store], T]) -> Future[T]:
        """Queues a call. A lost connection sets ``StoreBrokenError`` in the future."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def call(self, call: Callable[[Store], T], timeout_s: float) -> T:
        """Makes a call and waits for its result.

        Raises StoreBrokenError if the connection has ended. Raises StoreSilentError if there was no answer in time; the
        call may still take effect later.
        """
        try:
            return self.submit(call).result(max(0.0, timeout_s))
        except TimeoutError:
            raise StoreSilentError(f"no answer within {timeout_s:.3g} s") from None

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Ends the thread, or leaves it to the interpreter if it hangs in a call. Idempotent. Whether it has ended."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self, connect: Callable[[], Store]) -> None:
        store: Store | None = None
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                if store is None:
                    store = connect()
                future.set_result(call(store))
            except (LockstepError, StoreBrokenError) as error:
                future.set_exception(error)
            except RuntimeError as error:  # torch's DistError, and what its C++ raises besides
                future.set_exception(StoreBrokenError(str(error).partition("\n")[0]))
            except Exception as error:  # noqa: BLE001 - what others have written may be anything
                reason = f"the job's store has what no worker writes ({type(error).__name__}: {error})"
                future.set_exception(ClusterError(f"{reason}; end the program that uses it, or choose another port"))
            # The thread sleeps in ``get`` with its last locals: without this they would keep a call's closure, and what
            # it refers to, alive until the next call.
            del item, call, future


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where this process reaches the store: the IP address and the port that answered, and its own address there."""

    host: str
    port: int
    own_host: str

    def connect(self) -> Store:
        """A new client with a connection of its own."""
        return TCPStore(self.host, self.port, None, False, _CONNECT_TIMEOUT, False)


def find_store(host: str, port: int) -> StoreAddress:
    """Connects once to find out whether the store answers, and by which addresses; else raises StoreBrokenError.

    torch's client would retry by itself and print a C++ traceback to stderr for each failure.
    """
    try:
        with socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S) as probe:
            return StoreAddress(host=probe.getpeername()[0], port=port, own_host=probe.getsockname()[0])
    except socket.gaierror as error:
        raise StoreBrokenError(f"the name {host!r} cannot be looked up ({error.strerror})") from None
    except TimeoutError:
        raise StoreBrokenError(f"{join_address(host, port)} does not answer") from None
    except OSError as error:
        raise StoreBrokenError(f"{join_address(host, port)}: {error.strerror or error}") from None


def serve_store(listener: socket.socket) -> Store:
    """Serves a store on a listening socket, which it takes over, for as long as the returned object lives."""
    _allow_many_connections()
    host, port = listener.getsockname()[:2]
    # Without the socket TCPStore would listen on all of the machine's addresses.
    return TCPStore(host, port, None, True, _CONNECT_TIMEOUT, False, master_listen_fd=listener.detach())


def _allow_many_connections() -> None:
    """Raises this process's limit of open files: most systems begin with 1,024, which many workers exceed."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if limit not in (resource.RLIM_INFINITY, target) and limit < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, most))


def listen(host: str, port: int, who: str) -> socket.socket:
    """A socket that listens on one address of this machine; port 0 is any free one. The caller must close it.

    ``who`` listens, for messages: "worker 0 (hosta:20000)". Raises UnknownHostError if the host cannot be looked up,
    PortTakenError if another program listens there, and ClusterError if it cannot be used.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UnknownHostError(
            f"the host of {who} cannot be looked up ({error.strerror}); give an address that can be looked up here"
        ) from None
    if any(_is_every_address(str(address[0])) for *_, address in addresses):
        raise ClusterError(
            f"{who} would listen on every address of this machine, as {host!r} means them all; give the one by which "
            "the others reach it"
        )
    failure: OSError | None = None
    for family, _, _, _, address in addresses:
        try:
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            failure = error
    raise _listen_error(failure, host, port, who)


def _is_every_address(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_unspecified


def _listen_error(failure: OSError | None, host: str, port: int, who: str) -> ClusterError:
    code = failure.errno if failure else None
    if code == errno.EADDRINUSE:
        return PortTakenError(
            f"{who} cannot listen: port {port} of {host} is in use by another program; end that (ss -ltnp lists them), "
            "choose another port, or give this process another index if that one is the same worker"
        )
    if code == errno.EADDRNOTAVAIL:
        return ClusterError(
            f"{who} cannot listen: {host} is not an address of this machine ({socket.gethostname()}); "
            "start it on the machine with that address, or correct the cluster or this process's index"
        )
    if code == errno.EACCES:
        return ClusterError(f"{who} cannot listen: port {port} needs privileges; choose one above 1023")
    return ClusterError(f"{who} cannot listen at {join_address(host, port)}: {failure}")
