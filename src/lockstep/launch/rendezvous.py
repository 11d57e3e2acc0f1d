"""How the launchers of a job meet: torch's rendezvous handlers, on stores that listen where they are told."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lockstep.cluster.address import join_address, parse_address
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.output import Tell
from lockstep.membership.store import NotHereError, PortTakenError, StoreBrokenError, bind_to, find_route, serve

_PREFIX = "lockstep/launch"
_READ_LIMIT = timedelta(seconds=300)
_ANSWER_LIMIT = timedelta(seconds=10)
_RETRY_S = 0.25
_TELL_S = 5.0


def new_job_id() -> str:
    """An id for one run of a job: when it began, to find its logs by, and what tells it from all others."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, kw_only=True)
class Hall:
    """A store that has been reached, and whose job is this launcher's.

    Args:
        store: all of it.
        job_id: the random id of this run of the job.
        own_host: this machine's address, as the others reach it.
    """

    store: Store
    job_id: str
    own_host: str

    @classmethod
    def serve(cls, listener: socket.socket, job: str) -> Hall:
        """Serves the store on a listening socket, which it takes over."""
        own_host = listener.getsockname()[0]
        store = serve(listener)
        store.set_timeout(_READ_LIMIT)
        job_id = new_job_id()
        PrefixStore(_PREFIX, store).set("job", json.dumps([job, job_id]))
        return cls(store=store, job_id=job_id, own_host=own_host)

    @classmethod
    def find(cls, host: str, port: int, job: str, *, timeout_s: float, tell: Tell) -> Hall:
        """Reaches the store, waiting for it to be served.

        Raises:
            ClusterError: nobody serves it in time, or it is another job's.
        """
        wait = _Waiting(timeout_s, tell)
        while True:
            try:
                return cls._enter(host, port, job)
            except StoreBrokenError as error:
                wait.on(f"the launcher of the first host ({error})")

    @classmethod
    def serve_or_find(cls, host: str, port: int, job: str, *, timeout_s: float, tell: Tell) -> Hall:
        """Serves the store as soon as the address is this machine's and free; reaches it when another launcher does.

        A machine may come to know its own name or address only after a while, as a Kubernetes pod does.

        Raises:
            ClusterError: nobody serves it in time, this launcher must not, or it is another job's.
        """
        wait = _Waiting(timeout_s, tell)
        while True:
            try:
                return cls.serve(bind_to(host, port, "the launcher"), job)
            except (NotHereError, PortTakenError):
                pass  # another launcher may serve it, elsewhere or here
            try:
                return cls._enter(host, port, job)
            except StoreBrokenError as error:
                wait.on(f"the launcher that serves the rendezvous ({error})")

    @classmethod
    def _enter(cls, host: str, port: int, job: str) -> Hall:
        """Reaches the store if it is served now.

        Raises:
            StoreBrokenError: it is not.
            ClusterError: it is another job's.
        """
        route = find_route(host, port)
        try:
            store = route.connect()
        except RuntimeError as error:  # it has ended just now
            raise StoreBrokenError(str(error).partition("\n")[0]) from None
        job_id = _compare(PrefixStore(_PREFIX, store), job, join_address(host, port))
        store.set_timeout(_READ_LIMIT)
        return cls(store=store, job_id=job_id, own_host=route.own_host)

    def take_seat(self, index: int, address: str) -> None:
        """Says that the launcher of host ``index`` is here.

        Raises:
            ClusterError: another one has said so.
        """
        me = f"process {os.getpid()} on {socket.gethostname()}"
        there = self._seats.compare_set(f"seat/{index}", "", me).decode()
        if there != me:
            raise ClusterError(
                f"host {index} ({address}) of this job is {there} already, and this is {me};"
                " give every launcher an index of its own"
            )

    def wait_for_seats(self, hosts: Sequence[str], *, timeout_s: float, tell: Tell) -> None:
        """Stays until the launchers of all hosts are here.

        Raises:
            ClusterError: they were not in time; those missing are named.
        """
        wait = _Waiting(timeout_s, tell)
        while True:
            missing = [index for index in range(len(hosts)) if not self._seats.check([f"seat/{index}"])]
            if not missing:
                return
            wait.on(", ".join(f"the launcher of host {index} ({hosts[index]})" for index in missing))

    @property
    def _seats(self) -> Store:
        return PrefixStore(f"{_PREFIX}/{self.job_id}", self.store)


def _compare(store: Store, job: str, where: str) -> str:
    """The id of the job whose store this is.

    Raises:
        ClusterError: it is another job's, or no launcher's at all.
    """
    try:
        store.wait(["job"], _ANSWER_LIMIT)
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


class _Waiting:
    """Waits a little at a time, says on whom every few seconds, and gives up in the end."""

    def __init__(self, timeout_s: float, tell: Tell) -> None:
        self._timeout_s, self._tell = timeout_s, tell
        self._since = self._told = time.monotonic()
        self._pause = threading.Event()

    def on(self, whom: str) -> None:
        now = time.monotonic()
        if now - self._since > self._timeout_s:
            raise ClusterError(f"waited {self._timeout_s:g} s for {whom}; start it, or give it longer with --timeout-s")
        if now - self._told > _TELL_S:
            self._told = now
            self._tell(f"waiting for {whom}, {now - self._since:.0f} s so far")
        self._pause.wait(_RETRY_S)


_GAVE_UP, _READ = "lockstep/gave_up", "lockstep/read"
_READ_LIMIT_S, _POLL_S = 2.0, 0.02


class FixedRendezvous(RendezvousHandler):
    """Launchers whose number and order are known: there is nothing to find out, only where the workers' store is.

    The launcher of the first host serves it, a new one for every attempt: workers that are started again would read
    what those before them had written.

    Args:
        store: where the launchers meet.
        host: the address of the first host, on which the workers' store listens.
        job_id: the prefix of all keys; launchers of another job never read them.
        index: this launcher's number, from 0.
        hosts: how many launchers there are.
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
        """A name for torch's records of events."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """The workers use this store; none of them serves one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Serves the store of the next attempt, or learns where it is."""
        store = PrefixStore(f"attempt/{self._attempts}", self._store)
        self._attempts += 1
        port = 0
        if self._index == 0:
            listener = bind_to(self._host, 0, "the launcher")
            port = listener.getsockname()[1]
            self._served = serve(listener)
        meeting = RendezvousStoreInfo.build(self._index, store, self._host, port)
        return RendezvousInfo(store, self._index, self._hosts, meeting)

    def is_closed(self) -> bool:
        """It never is: the launchers of a fixed list may always start their workers again."""
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can join; but a launcher that gave up has said so, and why. The agent asks at every look.

        Raises:
            ClusterError: one has, or the store has ended with the launcher that served it.
        """
        if self._hosts == 1:
            return 0
        try:
            if not self._store.check([_GAVE_UP]):
                return 0
            cause = self._store.get(_GAVE_UP).decode()
            self._store.add(_READ, 1)
        except RuntimeError as error:
            raise ClusterError(
                "the launcher of host 0, which serves the store, has ended; its terminal says why"
            ) from error
        raise ClusterError(cause)

    def take_leave(self) -> None:
        """Ends in good order, when the workers of all hosts have ended.

        The one that serves the store waits a moment until the others have asked. For those a store that has ended is
        no error any more.

        Raises:
            ClusterError: another launcher gave up.
        """
        if self._hosts == 1:
            return
        try:
            cause = self._store.get(_GAVE_UP).decode() if self._store.check([_GAVE_UP]) else ""
            self._be_read()
        except RuntimeError:
            return
        if cause:
            raise ClusterError(cause)

    def give_up(self, cause: str, release: Callable[[], None]) -> None:
        """Tells the other launchers why this one's workers will not go on; the first cause stays.

        The one that serves the store waits a moment until the others have read it.

        Args:
            cause: which worker failed, and how.
            release: lets those launchers go on that wait for this one's workers to finish.
        """
        if self._hosts == 1:
            return
        try:
            self._store.compare_set(_GAVE_UP, "", f"{cause} (host {self._index})")
            release()
            self._be_read()
        except RuntimeError:
            return  # the store has ended: the others know

    def _be_read(self) -> None:
        """Says that this launcher has read how the job ended; the one that serves the store waits for all others."""
        until = time.monotonic() + _READ_LIMIT_S
        self._store.add(_READ, int(self._index != 0))
        while self._index == 0 and self._store.add(_READ, 0) < self._hosts - 1 and time.monotonic() < until:
            threading.Event().wait(_POLL_S)

    def get_run_id(self) -> str:
        """The job's id, which the workers find in TORCHELASTIC_RUN_ID."""
        return self._job_id

    def shutdown(self) -> bool:
        """The store ends with the last reference to it."""
        return True


class FreshStores(DynamicRendezvousHandler):
    """torch's dynamic rendezvous; each round's workers get a store of their own, which listens on one address.

    torch makes that store once, on all interfaces, and keeps it when launchers come or go. A round that follows such a
    change counts as no restart, so its workers would read what those of the round before had written.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other launchers; the first of them serves a new store."""
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Store:
        return serve(bind_to(master_addr, master_port, "this launcher's store"))


LOOPBACK = "127.0.0.1"
READ_LIMIT = timedelta(seconds=300)
"""How long a launcher waits for what another one writes into the store."""

LAST_CALL = timedelta(seconds=5)
"""How long they wait for more once enough have come."""


class Meeting(ABC):
    """A way for launchers to meet."""

    @abstractmethod
    def meet(self, tell: Tell) -> RendezvousHandler:
        """Reaches or serves the store, and gives what torch's agent asks for."""


@dataclass(frozen=True, kw_only=True)
class OneHost(Meeting):
    """A single launcher: nobody else can reach its store, which listens on 127.0.0.1, on a free port."""

    def meet(self, tell: Tell) -> RendezvousHandler:
        """Serves the store."""
        listener = bind_to(LOOPBACK, 0, "the launcher")
        store = serve(listener)
        store.set_timeout(READ_LIMIT)
        return FixedRendezvous(store, host=LOOPBACK, job_id=new_job_id())


@dataclass(frozen=True, kw_only=True)
class FixedHosts(Meeting):
    """One launcher on each of the hosts of a list; the first one's store listens on its own address in the list.

    Args:
        hosts: their addresses, "host:port".
        index: which of them this launcher is.
        job: what all launchers of the job have in common and others do not.
        timeout_s: seconds to wait for the others.
    """

    hosts: tuple[str, ...]
    index: int
    job: str
    timeout_s: float = 600.0

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

    def meet(self, tell: Tell) -> RendezvousHandler:
        """Serves the store on the first host; reaches it from the others."""
        host, port = parse_address(self.hosts[0])
        if self.index == 0:
            hall = Hall.serve(bind_to(host, port, f"the launcher of host 0 ({self.hosts[0]})"), self.job)
        else:
            hall = Hall.find(host, port, self.job, timeout_s=self.timeout_s, tell=tell)
        hall.take_seat(self.index, self.hosts[self.index])
        hall.wait_for_seats(self.hosts, timeout_s=self.timeout_s, tell=tell)
        return FixedRendezvous(hall.store, host=host, job_id=hall.job_id, index=self.index, hosts=len(self.hosts))


@dataclass(frozen=True, kw_only=True)
class ComingHosts(Meeting):
    """Launchers that come and go between a least and a greatest number; torch's dynamic rendezvous.

    Args:
        address: "host:port" of the store. The launcher whose machine has that address serves it.
        least: how many must have come.
        most: how many are let in.
        job: what all launchers of the job have in common and others do not.
        timeout_s: seconds to wait for the others.
    """

    address: str
    least: int
    most: int
    job: str
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parse_address(self.address)
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"nodes={self.least}:{self.most} was given, expected LEAST:MOST such as 1:4")

    def meet(self, tell: Tell) -> RendezvousHandler:
        """Serves the store where the address is this machine's and free; reaches it elsewhere."""
        host, port = parse_address(self.address)
        hall = Hall.serve_or_find(host, port, self.job, timeout_s=self.timeout_s, tell=tell)
        handler: RendezvousHandler = FreshStores.from_backend(
            hall.job_id,
            hall.store,
            C10dRendezvousBackend(hall.store, hall.job_id),
            self.least,
            self.most,
            local_addr=hall.own_host,
            timeout=RendezvousTimeout(join=timedelta(seconds=self.timeout_s), last_call=LAST_CALL),
        )
        return handler
