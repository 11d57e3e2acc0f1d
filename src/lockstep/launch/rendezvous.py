"""How the launchers of a job find each other: alone on one host, by a fixed list of hosts, or as they come and go.

Launchers of several hosts meet in a store. Whoever serves it writes down what the job is, with a random id. Every other
launcher compares the job before anything else, so one of another job or command leaves with an error and has changed
nothing.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lockstep._torch_compat import PrefixStore, Store
from lockstep.cluster.spec import join_address, parse_address
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.output import StatusCallback
from lockstep.membership.rendezvous import Deadline, this_process
from lockstep.membership.store import NotHereError, PortTakenError, StoreBrokenError, find_store, listen, serve_store

_LOOPBACK = "127.0.0.1"
_PREFIX = "lockstep/launch"
_READ_TIMEOUT = timedelta(seconds=300)  # how long a launcher waits for what another one writes into the store
_JOB_TIMEOUT = timedelta(seconds=10)
_LAST_CALL = timedelta(seconds=5)  # how long elastic hosts wait for more once enough have come
_RETRY_S = 0.25
_GAVE_UP, _READ = "lockstep/gave_up", "lockstep/read"
_READ_LIMIT_S, _READ_POLL_S = 2.0, 0.02


class Hosts(ABC):
    """Which hosts the launchers of a job are on, and how they meet."""

    @abstractmethod
    def meet(self, on_status: StatusCallback) -> RendezvousHandler:
        """Serves or reaches the launchers' store; returns the handler that torch's agent needs."""


@dataclass(frozen=True, kw_only=True)
class OneHost(Hosts):
    """A single launcher. Its store listens on a free port of 127.0.0.1."""

    def meet(self, on_status: StatusCallback) -> RendezvousHandler:
        store = serve_store(listen(_LOOPBACK, 0, "the launcher"))
        store.set_timeout(_READ_TIMEOUT)
        return FixedRendezvous(store, host=_LOOPBACK, job_id=_new_job_id())


@dataclass(frozen=True, kw_only=True)
class FixedHosts(Hosts):
    """One launcher on each host of a list; the first one's store listens on its own address in the list."""

    hosts: tuple[str, ...]  # their addresses, "host:port"
    index: int  # this launcher's place in the list
    job: str  # what all launchers of the job have in common and others do not
    timeout_s: float = 600.0  # how many seconds to wait for the others

    def __post_init__(self) -> None:
        for host in self.hosts:
            parse_address(host)
        if len(set(self.hosts)) != len(self.hosts):
            raise ConfigError(f"hosts={','.join(self.hosts)} names one twice; name each once, with a port of its own")
        if not 0 <= self.index < len(self.hosts):
            raise ConfigError(
                f"index={self.index} was given for {len(self.hosts)} hosts, expected 0 to {len(self.hosts) - 1}:"
                " this host's place in the list"
            )

    def meet(self, on_status: StatusCallback) -> RendezvousHandler:
        host, port = parse_address(self.hosts[0])
        deadline = _deadline(self.timeout_s, on_status)
        if self.index == 0:
            found = LauncherStore.serve(listen(host, port, f"the launcher of host 0 ({self.hosts[0]})"), self.job)
        else:
            found = LauncherStore.find(host, port, self.job, deadline)
        found.register(self.index, self.hosts[self.index])
        found.wait_for_all(self.hosts, deadline)
        return FixedRendezvous(found.store, host=host, job_id=found.job_id, index=self.index, hosts=len(self.hosts))


@dataclass(frozen=True, kw_only=True)
class ElasticHosts(Hosts):
    """Launchers that come and go between a least and a greatest number, by torch's dynamic rendezvous."""

    address: str  # "host:port" of the store. The launcher whose machine has that address serves it.
    least: int  # how many must have come
    most: int  # how many are let in
    job: str  # what all launchers of the job have in common and others do not
    timeout_s: float = 600.0  # how many seconds to wait for the others

    def __post_init__(self) -> None:
        parse_address(self.address)
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"nodes={self.least}:{self.most} was given, expected LEAST:MOST such as 1:4")

    def meet(self, on_status: StatusCallback) -> RendezvousHandler:
        host, port = parse_address(self.address)
        found = LauncherStore.serve_or_find(host, port, self.job, _deadline(self.timeout_s, on_status))
        handler: RendezvousHandler = ElasticRendezvous.from_backend(
            found.job_id,
            found.store,
            C10dRendezvousBackend(found.store, found.job_id),
            self.least,
            self.most,
            local_addr=found.own_host,
            timeout=RendezvousTimeout(join=timedelta(seconds=self.timeout_s), last_call=_LAST_CALL),
        )
        return handler


@dataclass(frozen=True, kw_only=True)
class LauncherStore:
    """The store of the launchers of this job."""

    store: Store  # the client, or the server itself
    job_id: str  # the random id of this run of the job
    own_host: str  # this machine's address as the others reach it

    @classmethod
    def serve(cls, listener: socket.socket, job: str) -> LauncherStore:
        """Serves the store on a listening socket, which it takes over."""
        own_host = listener.getsockname()[0]
        store = serve_store(listener)
        store.set_timeout(_READ_TIMEOUT)
        job_id = _new_job_id()
        PrefixStore(_PREFIX, store).set("job", json.dumps([job, job_id]))
        return cls(store=store, job_id=job_id, own_host=own_host)

    @classmethod
    def find(cls, host: str, port: int, job: str, deadline: Deadline) -> LauncherStore:
        """Waits for the store to be served; raises ClusterError if it is late or belongs to another job."""
        while True:
            try:
                return cls._reach(host, port, job)
            except StoreBrokenError as error:
                _wait_for(f"the launcher of the first host ({error})", deadline)

    @classmethod
    def serve_or_find(cls, host: str, port: int, job: str, deadline: Deadline) -> LauncherStore:
        """Serves the store once the address is this machine's and free; reaches it when another launcher serves it.

        A machine may know its own name or address only after a while, as a Kubernetes pod does. Raises ClusterError if
        the store is late, cannot be served, or belongs to another job.
        """
        while True:
            try:
                return cls.serve(listen(host, port, "the launcher"), job)
            except (NotHereError, PortTakenError):
                pass  # another launcher may serve it, elsewhere or here
            try:
                return cls._reach(host, port, job)
            except StoreBrokenError as error:
                _wait_for(f"the launcher that serves the rendezvous ({error})", deadline)

    @classmethod
    def _reach(cls, host: str, port: int, job: str) -> LauncherStore:
        """Reaches the store; StoreBrokenError if it is not served now, ClusterError if it belongs to another job."""
        address = find_store(host, port)
        try:
            store = address.connect()
        except RuntimeError as error:  # it has ended just now
            raise StoreBrokenError(str(error).partition("\n")[0]) from None
        job_id = _check_job(PrefixStore(_PREFIX, store), job, join_address(host, port))
        store.set_timeout(_READ_TIMEOUT)
        return cls(store=store, job_id=job_id, own_host=address.own_host)

    def register(self, index: int, address: str) -> None:
        """Says that the launcher of host ``index`` is here; raises ClusterError if another launcher has said so."""
        registered = self._hosts.compare_set(f"host/{index}", "", this_process()).decode()
        if registered != this_process():
            raise ClusterError(
                f"host {index} ({address}) of this job is {registered} already, and this is {this_process()};"
                " give every launcher its own index"
            )

    def wait_for_all(self, hosts: Sequence[str], deadline: Deadline) -> None:
        """Waits until the launchers of all hosts are here; raises ClusterError with the names of late ones."""
        while missing := [index for index in range(len(hosts)) if not self._hosts.check([f"host/{index}"])]:
            _wait_for(", ".join(f"the launcher of host {index} ({hosts[index]})" for index in missing), deadline)

    @property
    def _hosts(self) -> Store:
        return PrefixStore(f"{_PREFIX}/{self.job_id}", self.store)


def _new_job_id() -> str:
    """An id for one run of a job: its start, to find its logs by, and a random part."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:12]}"


def _check_job(store: Store, job: str, where: str) -> str:
    """The id of the job that the store belongs to; raises ClusterError if that is another job, or no launcher's."""
    try:
        store.wait(["job"], _JOB_TIMEOUT)
        theirs, job_id = json.loads(store.get("job"))
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"what answers at {where} is no launcher of lockstep; end it, or choose another address"
        ) from error
    if theirs != job:
        raise ClusterError(
            f"the launcher at {where} runs {theirs!r}, and this one {job!r}; start the same command on every host, or"
            " choose another port"
        )
    return str(job_id)


def _deadline(timeout_s: float, on_status: StatusCallback) -> Deadline:
    return Deadline("this launcher", timeout_s, report=on_status)


def _wait_for(missing: str, deadline: Deadline) -> None:
    deadline.check(missing, "start it, or give it longer with --timeout-s")
    threading.Event().wait(_RETRY_S)


class FixedRendezvous(RendezvousHandler):
    """The handler for launchers whose number and order are known: it only tells where the workers' store is.

    The launcher of the first host serves that store at ``host``, a new one for every attempt: restarted workers would
    otherwise read what those before them had written. ``job_id`` is the prefix of all keys; launchers of another job
    never read them.
    """

    def __init__(self, store: Store, *, host: str, job_id: str, index: int = 0, hosts: int = 1) -> None:
        self._store = PrefixStore(job_id, store)
        self._host = host
        self._job_id = job_id
        self._index = index
        self._hosts = hosts
        self._attempts = 0
        self._served: Store | None = None

    def get_backend(self) -> str:
        return "lockstep"  # for torch's event records

    @property
    def use_agent_store(self) -> bool:
        return True  # none of the workers serves one

    def next_rendezvous(self) -> RendezvousInfo:
        """Serves the store of the next attempt, or learns where it is."""
        store = PrefixStore(f"attempt/{self._attempts}", self._store)
        self._attempts += 1
        port = 0
        if self._index == 0:
            listener = listen(self._host, 0, "the launcher")
            port = listener.getsockname()[1]
            self._served = serve_store(listener)
        where = RendezvousStoreInfo.build(self._index, store, self._host, port)
        return RendezvousInfo(store, self._index, self._hosts, where)

    def is_closed(self) -> bool:
        return False  # the launchers of a fixed list may always start their workers again

    def set_closed(self) -> None:
        return  # nobody else could join

    def num_nodes_waiting(self) -> int:
        """Always 0, since nobody else can join. The agent asks at every look, so this is where a failure is found.

        Raises:
            ClusterError: another launcher gave up, or the store has ended with the launcher that served it.
        """
        if self._hosts == 1:
            return 0
        try:
            cause = self._read_cause()
            if cause:
                self._store.add(_READ, 1)
        except RuntimeError as error:
            raise ClusterError(
                "the launcher of host 0, which serves the store, has ended; its terminal says why"
            ) from error
        if cause:
            raise ClusterError(cause)
        return 0

    def finish(self) -> None:
        """Ends normally when the workers of all hosts have ended; raises ClusterError if another launcher gave up.

        The launcher that serves the store waits a moment until the others have called this too. For those, a store
        that has ended is no longer an error.
        """
        if self._hosts == 1:
            return
        try:
            cause = self._read_cause()
            self._wait_until_read()
        except RuntimeError:
            return
        if cause:
            raise ClusterError(cause)

    def give_up(self, cause: str, release: Callable[[], None]) -> None:
        """Tells the other launchers why this one's workers will not go on; the first cause is kept.

        The launcher that serves the store waits a moment until the others have read it. ``release`` lets launchers go
        on that wait for this one's workers to finish.
        """
        if self._hosts == 1:
            return
        try:
            self._store.compare_set(_GAVE_UP, "", f"{cause} (host {self._index})")
            release()
            self._wait_until_read()
        except RuntimeError:
            return  # the store has ended: the others know

    def get_run_id(self) -> str:
        """The job's id, which the workers find in TORCHELASTIC_RUN_ID."""
        return self._job_id

    def shutdown(self) -> bool:
        return True  # the store ends with the last reference to it

    def _read_cause(self) -> str:
        return self._store.get(_GAVE_UP).decode() if self._store.check([_GAVE_UP]) else ""

    def _wait_until_read(self) -> None:
        """Says that this launcher knows how the job ended; the one that serves the store waits for all others."""
        until = time.monotonic() + _READ_LIMIT_S
        self._store.add(_READ, int(self._index != 0))
        while self._index == 0 and self._store.add(_READ, 0) < self._hosts - 1 and time.monotonic() < until:
            threading.Event().wait(_READ_POLL_S)


class ElasticRendezvous(DynamicRendezvousHandler):
    """torch's dynamic rendezvous, where each round's workers get a new store that listens on one address.

    torch makes that store once, on all interfaces, and keeps it when launchers come or go. A round after such a change
    does not count as a restart, so its workers would read what those of the round before had written.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other launchers; the first of them serves a new store."""
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Store:
        return serve_store(listen(master_addr, master_port, "this launcher's store"))
