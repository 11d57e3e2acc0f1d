"""The communicator of a device mesh, where several processes hold one replica of the model together.

    all_gather_numbers, all_gather_bytes   all processes take part; the result has one value per replica, its leader's
    all_reduce, all_gather                 the leaders' tensors; those of other processes do not count

So a sum over workers counts each replica once, and a process that does not know a value, such as a pipeline stage that
never sees the loss, learns it from one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lockstep.collectives.communicator import Communicator

T = TypeVar("T")


class MeshCommunicator(Communicator):
    """Shows each replica of the model as one worker.

    Args:
        job: the communicator of all processes.
        replica: the replica that this process is part of.
        leaders: per replica, the process whose values count.
        chief: whether this process is the chief of the job.
        layout: how the processes of a replica divide the model.
        ends_with: called before the job is closed.
    """

    def __init__(
        self,
        job: Communicator,
        *,
        replica: int,
        leaders: Sequence[int],
        chief: bool,
        layout: str = "",
        ends_with: Sequence[Callable[[], None]] = (),
    ) -> None:
        names = [f"replica {number}, of {job.names[leader]}," for number, leader in enumerate(leaders)]
        super().__init__(
            replica, (1,) * len(leaders), names, single=job.size == 1, chief=chief, leaders=leaders, layout=layout
        )
        self._job, self._ends_with = job, tuple(ends_with)
        self.is_leader = job.index in self.leaders

    @property
    def processes(self) -> Communicator:
        return self._job

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        return self._of_leaders(lambda: self._job.all_gather_numbers(name, numbers))

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        return self._of_leaders(lambda: self._job.all_gather_bytes(name, payload if self.is_leader else b""))

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        return self._job.broadcast_bytes(name, payload)

    def all_reduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = tensors if self.is_leader else [torch.zeros_like(tensor) for tensor in tensors]
        return self._job.all_reduce(name, own)

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        gathered = self._job.all_gather(name, tensor if self.is_leader else tensor.narrow(axis, 0, 0), axis)
        return [gathered[leader] for leader in self.leaders]

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._job.broadcast(name, tensors)

    def add_digest(self, digest: int) -> None:
        self._job.add_digest(digest)

    def set_status(self, text: str) -> None:
        self._job.set_status(text)

    def close(self) -> None:
        for end in self._ends_with:
            end()
        self._job.close()

    def _of_leaders(self, gather: Callable[[], list[T]]) -> list[T]:
        """Gathers from all processes, with the flags that this one has set, and returns the leaders' values."""
        sent = self._own_flags
        self._job.set_flags(sent)
        gathered = gather()
        agreed = self._job.agreed_flags
        self._job.clear_flags(agreed)
        self._receive_flags(agreed, sent=sent)
        return [gathered[leader] for leader in self.leaders]
