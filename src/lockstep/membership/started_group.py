"""The process group of torch that a program, or the engine that runs it, has made before the strategy.

Ray Train makes one, and so do Accelerate's ``PartialState`` and every program that calls ``init_process_group``. Its
rank and its size say which worker this is. Its store says where the chief's store listens: the port in the variables
is the one that the group's own store has taken.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from lockstep._torch_compat import Store, default_group_store, innermost_store
from lockstep.cluster.spec import ClusterSpec, join_address
from lockstep.errors import ClusterError
from lockstep.membership.store import StoreBrokenError, StoreClient, StoreSilentError, read

_ADDRESS_KEY = "lockstep/address"
_ANSWER_TIMEOUT_S = 5.0
_REMEDY = (
    "make the group and the strategy with the same description of the job, or call "
    "torch.distributed.destroy_process_group() before the strategy is made"
)


@dataclass(frozen=True, kw_only=True)
class StartedGroup:
    """torch's default process group, as it stands in this process.

    Args:
        rank: this process's.
        size: the number of processes.
        backend: torch's name for it: "gloo", "nccl" and others.
        host: the one that serves the group's store; empty if the store has no address.
        store: what the group was made with.
    """

    rank: int
    size: int
    backend: str
    host: str
    store: Store


def started_group() -> StartedGroup | None:
    """The default process group of this process; None if nobody has made one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = default_group_store()
    return StartedGroup(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        backend=dist.get_backend(),
        host=str(getattr(innermost_store(store), "host", "")),
        store=store,
    )


def cluster_with_group(declared: ClusterSpec | None, group: StartedGroup | None) -> ClusterSpec | None:
    """The cluster of a process that has a process group: the declared one, or that of the group. Pure.

    Raises ClusterError if the group has another size than the cluster, or another rank than this worker.
    """
    if group is None or (declared is not None and declared.task != "worker"):
        return declared
    if declared is not None:
        if (declared.num_workers, declared.index) != (group.size, group.rank):
            raise ClusterError(
                f"torch's process group makes this process {group.rank} of {group.size}, and {declared.source} "
                f"declares worker {declared.index} of {declared.num_workers}; {_REMEDY}"
            )
        return declared
    if group.size == 1:
        return None
    if not group.host:
        raise ClusterError(
            f"torch's process group ({group.backend}) makes this process {group.rank} of {group.size}, and neither its "
            "store nor a variable names the host of process 0; make the group with "
            "init_method='tcp://hosta:29500', or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE"
        )
    # Nobody listens at this port: the board below says where the chief does. It stands in names and messages.
    chief = join_address(group.host, getattr(innermost_store(group.store), "port", 1))
    return ClusterSpec(workers=(chief, *[""] * (group.size - 1)), index=group.rank, source="torch's process group")


class AddressBoard:
    """Where the chief of a job tells the others the address of its store, in the store of a ``StartedGroup``.

    The address stands there for the length of a rendezvous only, so that the next one does not read it.
    """

    def __init__(self, group: StartedGroup) -> None:
        self._backend = group.backend
        self._client = StoreClient(lambda: group.store)

    def tell(self, host: str, port: int) -> None:
        """Writes the address, on the chief. Raises ClusterError if the group's store cannot be written to."""
        self._write(json.dumps([host, port]))

    def clear(self) -> None:
        """Removes the address, on the chief, once all workers have registered."""
        self._write("")

    def ask(self) -> tuple[str, int]:
        """The chief's host and port. Raises StoreBrokenError if it has not written them yet."""
        try:
            text = self._client.call(lambda store: read(store, _ADDRESS_KEY), _ANSWER_TIMEOUT_S)
        except (StoreBrokenError, StoreSilentError) as error:
            self._refuse(error)
        if not text:
            raise StoreBrokenError("it has not said yet, in the store of torch's process group, where its store is")
        host, port = json.loads(text)
        return host, port

    def close(self) -> None:
        """Ends the thread. The group keeps its store."""
        self._client.close()

    def _write(self, text: str) -> None:
        try:
            self._client.call(lambda store: store.set(_ADDRESS_KEY, text), _ANSWER_TIMEOUT_S)
        except (StoreBrokenError, StoreSilentError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        raise ClusterError(
            f"torch's process group ({self._backend}) is there, and the store that it was made with does not pass on "
            "an address; make it with the backend gloo or nccl, or leave out torch.distributed.init_process_group"
        ) from error


def address_board(cluster: ClusterSpec) -> AddressBoard | None:
    """The board of this process's group; None without one, and where a launcher serves the job's store."""
    group = None if cluster.store_is_served else started_group()
    return None if group is None else AddressBoard(group)
