"""How the launchers of a job meet: one alone, or one on each host of a list.

The launchers of several hosts are the members of a job of their own (``membership``): so they wait for each other,
notice when one is lost, and all raise the cause of a failure. Their store is served by the first host. The workers'
store is another one, new for every attempt: restarted workers would otherwise read what those before them had written.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep._torch_compat import PrefixStore, Store
from lockstep.checks import check_seconds
from lockstep.cluster.spec import ClusterSpec, parse_address
from lockstep.errors import ConfigError
from lockstep.membership.membership import Membership, join
from lockstep.membership.store import listen, serve_store

LOOPBACK = "127.0.0.1"
_READ_TIMEOUT = timedelta(seconds=300)  # how long a launcher waits for what another one writes into the store


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a job, one launcher on each. By default this host alone."""

    hosts: tuple[str, ...] = ()  # their addresses, "host:port"; all but the first may be empty
    index: int = 0  # this launcher's place in the list
    job: str = ""  # what all launchers of the job have in common and others do not
    timeout_s: float = 600.0  # how many seconds to wait for the others

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        named = [host for host in self.hosts if host]
        if len(set(named)) != len(named):
            raise ConfigError(f"hosts={','.join(named)} names one twice; name each once, with a port of its own")
        if self.hosts and not 0 <= self.index < len(self.hosts):
            raise ConfigError(
                f"index={self.index} was given for {len(self.hosts)} hosts, expected 0 to {len(self.hosts) - 1}:"
                " this host's place in the list"
            )

    def name(self, index: int) -> str:
        """What messages call a host: "host 1 (hostb:29500)"."""
        return f"host {index} ({self.hosts[index]})" if self.hosts[index] else f"host {index}"

    def meet(self, on_status: Callable[[str], None]) -> Rendezvous:
        """Waits for the launchers of all hosts; raises ClusterError with the names of those that are late."""
        new_id = {"date": int(f"{datetime.now():%Y%m%d%H%M%S}"), "number": secrets.randbits(48)}
        if not self.hosts:
            return Rendezvous(new_id)
        spec = ClusterSpec(workers=self.hosts, index=self.index, job_id=self.job, noun="host")
        members = join(spec, timeout_s=self.timeout_s, info=new_id, report=on_status)
        return Rendezvous(members.infos[0], members, parse_address(self.hosts[0])[0])


class LauncherRendezvous(RendezvousHandler):
    """What launchers tell torch's agent and each other.

    ``finish`` and ``give_up`` do nothing in an elastic job, whose launchers agree on its end when they meet.
    """

    _run_id: str  # the job's id, which the workers find in TORCHELASTIC_RUN_ID

    def finish(self) -> None:
        """Ends normally when the workers of all hosts have ended; raises ClusterError if another launcher gave up."""

    def give_up(self, cause: str, release: Callable[[], None]) -> None:
        """Tells the other launchers why this one's workers will not go on; the first cause is kept.

        ``release`` lets launchers go on that wait for this one's workers to finish.
        """

    def get_backend(self) -> str:
        return "lockstep"  # for torch's event records

    @property
    def use_agent_store(self) -> bool:
        return True  # none of the workers serves one

    def is_closed(self) -> bool:
        return False  # launchers may always start their workers again

    def set_closed(self) -> None: ...

    def get_run_id(self) -> str:
        return self._run_id


class Rendezvous(LauncherRendezvous):
    """Tells torch's agent where the workers' store is, which the first host serves, and whether other hosts failed."""

    def __init__(self, run_id: Mapping[str, int], members: Membership | None = None, host: str = LOOPBACK) -> None:
        self._run_id = f"{run_id['date']}-{run_id['number']:012x}"  # the date, to find a job's logs by
        self._members, self._host = members, host
        self._attempts = 0
        self._served: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Serves the store of the next attempt, or learns where it is."""
        index, port = self._members.spec.index if self._members is not None else 0, 0
        if index == 0:
            # A free port is taken while it listens, and handed to the store with its socket: no other program can come
            # between.
            with listen(self._host, 0, "the launcher") as listener:
                port = listener.getsockname()[1]
                self._served = serve_store(listener)
        self._attempts += 1
        if self._members is None:
            assert self._served is not None  # as index is 0
            where = RendezvousStoreInfo(self._host, port)
            return RendezvousInfo(PrefixStore("lockstep/launch", self._served), 0, 1, where)
        store = self._members.store(f"attempt/{self._attempts}")
        store.set_timeout(_READ_TIMEOUT)
        build = partial(RendezvousStoreInfo.build, index, store, self._host, port)
        where = self._members.run_with_watchdog(build, "the start of the workers")
        return RendezvousInfo(store, index, self._members.spec.num_workers, where)

    def num_nodes_waiting(self) -> int:
        """Always 0, since nobody else can join. The agent asks at every look, so this is where a failure is found.

        Raises ClusterError if another launcher gave up or is lost.
        """
        if self._members is not None and (failure := self._members.failure) is not None:
            raise failure
        return 0

    def finish(self) -> None:
        # A launcher that has finished leaves first, so that the others need not wait for it, and then looks whether one
        # had given up: test_a_host_that_is_done_hears_of_the_failure_of_another.
        self.shutdown()
        self.num_nodes_waiting()

    def give_up(self, cause: str, release: Callable[[], None]) -> None:
        if self._members is not None:
            self._members.end_job(f"{cause} (host {self._members.spec.index})")
            release()

    def shutdown(self) -> bool:
        """Lets the others know that this launcher has ended; the store ends with it."""
        if self._members is not None:
            self._members.close()
        return True
