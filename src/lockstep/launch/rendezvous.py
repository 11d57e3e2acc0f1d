"""How the launchers of a job meet: torch's rendezvous handlers, on stores that listen where they are told."""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class FixedRendezvous(RendezvousHandler):
    """Launchers whose number and order are known: there is nothing to find out, only a store to share.

    The store is the workers' too, so that nobody has to find a second free port.

    Args:
        store: where they meet.
        host: the address at which the workers reach the store.
        port: its port.
        job_id: the prefix of all keys; launchers of another job never read them.
        index: this launcher's number, from 0.
        hosts: how many launchers there are.
    """

    def __init__(self, store: Store, *, host: str, port: int, job_id: str, index: int = 0, hosts: int = 1) -> None:
        self._store = PrefixStore(job_id, store)
        self._meeting = RendezvousStoreInfo(host, port)
        self._job_id = job_id
        self._index = index
        self._hosts = hosts

    def get_backend(self) -> str:
        """A name for torch's records of events."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """The workers use this store; none of them serves one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Gives what is known already."""
        return RendezvousInfo(self._store, self._index, self._hosts, self._meeting)

    def is_closed(self) -> bool:
        """It never is: the launchers of a fixed list may always start their workers again."""
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """The job's id, which the workers find in TORCHELASTIC_RUN_ID."""
        return self._job_id

    def shutdown(self) -> bool:
        """The store ends with the last reference to it."""
        return True
