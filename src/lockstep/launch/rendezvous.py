"""How the launchers of a job meet: torch's rendezvous handlers, on stores that listen where they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lockstep.errors import ClusterError
from lockstep.membership.store import bind_to, serve

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
