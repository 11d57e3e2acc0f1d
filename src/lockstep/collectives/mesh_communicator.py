"""The workers of a job whose copies of the model are each held by several of them.

    exchange     all workers take part; what comes back is one value per replica, that of its speaker
    sum, gather  the speakers' tensors; those of the others in the replica, which are the same or unknown, do not count

So whatever adds up over workers counts each replica once, and those who do not know a value (a stage of a pipeline that
never sees the loss) learn it from those who do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.collectives.communicator import Wish, Workers


class GridWorkers(Workers):
    """The replicas of a model, each seen as one worker.

    Args:
        job: all workers of the job.
        replica: that this one is part of.
        speakers: per replica, the worker of the job that speaks for it.
        chief: whether this worker is the job's.
        layout: how the workers of a replica divide the model.
        ends_with: what ends before the job does.
    """

    def __init__(
        self,
        job: Workers,
        *,
        replica: int,
        speakers: Sequence[int],
        chief: bool,
        layout: str = "",
        ends_with: Sequence[Callable[[], None]] = (),
    ) -> None:
        names = [f"replica {number}, of {job.names[speaker]}," for number, speaker in enumerate(speakers)]
        super().__init__(replica, (1,) * len(speakers), names, alone=job.size == 1, chief=chief)
        self._job = job
        self._speakers = tuple(speakers)
        self._speaks = job.index in self._speakers
        self._layout = layout
        self._ends_with = tuple(ends_with)

    @property
    def speaks(self) -> bool:
        """Whether what this worker says counts."""
        return self._speaks

    @property
    def everyone(self) -> Workers:
        """The workers of the job."""
        return self._job

    @property
    def speakers(self) -> tuple[int, ...]:
        """The worker that speaks for each replica."""
        return self._speakers

    @property
    def layout(self) -> str:
        """How the workers of a replica divide the model."""
        return self._layout

    def exchange(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        wishes = self._wishes
        self._job.wish(wishes)
        met = self._job.exchange(name, numbers)
        self._take_wishes(wishes)
        return [met[speaker] for speaker in self._speakers]

    def exchange_bytes(self, name: str, payload: bytes) -> list[bytes]:
        wishes = self._wishes
        self._job.wish(wishes)
        met = self._job.exchange_bytes(name, payload if self._speaks else b"")
        self._take_wishes(wishes)
        return [met[speaker] for speaker in self._speakers]

    def chiefs_bytes(self, name: str, payload: bytes) -> bytes:
        return self._job.chiefs_bytes(name, payload)

    def sum_tensors(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._job.sum_tensors(name, [tensor if self._speaks else torch.zeros_like(tensor) for tensor in tensors])

    def gather_tensors(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        gathered = self._job.gather_tensors(name, tensor if self._speaks else tensor.narrow(axis, 0, 0), axis)
        return [gathered[speaker] for speaker in self._speakers]

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._job.broadcast(name, tensors)

    def attach(self, digest: int) -> None:
        self._job.attach(digest)

    def doing(self, text: str) -> None:
        self._job.doing(text)

    def close(self) -> None:
        for end in self._ends_with:
            end()
        self._job.close()

    def _take_wishes(self, sent: Wish) -> None:
        granted = self._job.granted
        self._job.settle(granted)  # it is settled here
        self._grant(granted, sent=sent)
