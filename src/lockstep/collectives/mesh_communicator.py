"""The workers of a job whose copies of the model are each held by several of them.

    exchange     all workers take part; what comes back is one value per replica, that of its speaker
    sum, gather  the leaders' tensors; those of the others in the replica, which are the same or unknown, do not count

So whatever adds up over workers counts each replica once, and those who do not know a value (a stage of a pipeline that
never sees the loss) learn it from those who do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.collectives.communicator import Communicator, ControlFlags


class MeshCommunicator(Communicator):
    """The replicas of a model, each seen as one worker.

    Args:
        job: all workers of the job.
        replica: that this one is part of.
        leaders: per replica, the worker of the job that speaks for it.
        chief: whether this worker is the job's.
        layout: how the workers of a replica divide the model.
        ends_with: what ends before the job does.
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
        names = [f"replica {number}, of {job.names[speaker]}," for number, speaker in enumerate(leaders)]
        super().__init__(replica, (1,) * len(leaders), names, alone=job.size == 1, chief=chief)
        self._job = job
        self._leaders = tuple(leaders)
        self._is_leader = job.index in self._leaders
        self._layout = layout
        self._ends_with = tuple(ends_with)

    @property
    def is_leader(self) -> bool:
        """Whether what this worker says counts."""
        return self._is_leader

    @property
    def processes(self) -> Communicator:
        """The workers of the job."""
        return self._job

    @property
    def leaders(self) -> tuple[int, ...]:
        """The worker that speaks for each replica."""
        return self._leaders

    @property
    def layout(self) -> str:
        """How the workers of a replica divide the model."""
        return self._layout

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        wishes = self._wishes
        self._job.set_flags(wishes)
        met = self._job.all_gather_numbers(name, numbers)
        self._take_wishes(wishes)
        return [met[speaker] for speaker in self._leaders]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        wishes = self._wishes
        self._job.set_flags(wishes)
        met = self._job.all_gather_bytes(name, payload if self._is_leader else b"")
        self._take_wishes(wishes)
        return [met[speaker] for speaker in self._leaders]

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        return self._job.broadcast_bytes(name, payload)

    def all_reduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._job.all_reduce(
            name, [tensor if self._is_leader else torch.zeros_like(tensor) for tensor in tensors]
        )

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        gathered = self._job.all_gather(name, tensor if self._is_leader else tensor.narrow(axis, 0, 0), axis)
        return [gathered[speaker] for speaker in self._leaders]

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

    def _take_wishes(self, sent: ControlFlags) -> None:
        granted = self._job.agreed_flags
        self._job.clear_flags(granted)  # it is settled here
        self._grant(granted, sent=sent)
