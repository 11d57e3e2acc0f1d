"""How the launchers of a job find each other: alone on one host, by a fixed list of hosts, or as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousHandler
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from lockstep.cluster.address import parse_address
from lockstep.errors import ConfigError
from lockstep.launch.hall import Hall, new_job_id
from lockstep.launch.rendezvous import FixedRendezvous, FreshStores
from lockstep.launch.telling import Tell
from lockstep.membership.store import bind_to, serve

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
