"""Where a user's program called a collective: the nearest line outside this package and torch. For messages."""

from __future__ import annotations

import enum
import io
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.errors import ClusterError


class ControlFlags(enum.IntFlag):
    """What a worker would have all workers do together; one that wishes is enough."""

    LOGS = 1
    """Merge the metrics of this batch: some callback shows them."""
    STOP = 2
    """End the training after this batch."""
    SAVE = 4
    """Write a checkpoint after this batch."""


class Communicator(ABC):
    """A worker's view of all workers.

    Args:
        index: this worker's number, from 0.
        replicas: how many local replicas each worker runs, in worker order.
        names: how the workers are called in messages, such as "worker 1 (hostb:20001)".
        alone: whether there is nobody to talk to; None is where there is one worker.
        chief: whether this is the chief; None is where its number is 0.
    """

    def __init__(
        self,
        index: int,
        replicas: Sequence[int],
        names: Sequence[str],
        *,
        alone: bool | None = None,
        chief: bool | None = None,
    ) -> None:
        self._alone = len(replicas) == 1 if alone is None else alone
        self._chief = index == 0 if chief is None else chief
        self._index = index
        self._replicas = tuple(replicas)
        self._names = tuple(names)
        self._wishes = self._granted = ControlFlags(0)

    @property
    def index(self) -> int:
        """This worker's number, from 0."""
        return self._index

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self._replicas)

    @property
    def is_single(self) -> bool:
        """Whether this process has nobody to talk to, so that all is here already."""
        return self._alone

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0: the one that prints, logs and publishes checkpoints."""
        return self._chief

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many local replicas each worker runs, in worker order."""
        return self._replicas

    @property
    def names(self) -> tuple[str, ...]:
        """How the workers are called in messages."""
        return self._names

    @property
    def chief_name(self) -> str:
        """How the chief is called in messages."""
        return self._names[0]

    @property
    def num_replicas(self) -> int:
        """The replicas of all workers."""
        return sum(self._replicas)

    @property
    def first_replica(self) -> int:
        """The number, among the replicas of all workers, of this worker's first."""
        return sum(self._replicas[: self._index])

    @property
    def processes(self) -> Communicator:
        """The processes one by one, where several of them are seen as one worker here; else these workers."""
        return self

    @property
    def leaders(self) -> tuple[int, ...]:
        """Of each worker the number, in ``everyone``, of the process whose values count."""
        return tuple(range(self.size))

    @property
    def layout(self) -> str:
        """How the processes of a worker divide what it holds among them; empty where they do not."""
        return ""

    def set_flags(self, what: ControlFlags) -> None:
        """Notes a wish, which the next exchange of any kind makes known to all workers."""
        self._wishes |= what

    @property
    def agreed_flags(self) -> ControlFlags:
        """All workers' wishes that exchanges have told of and nobody has settled: the same on every worker."""
        return self._granted

    def clear_flags(self, flags: ControlFlags) -> None:
        """Strikes out wishes that have been granted. Every worker must call it at the same point of the program."""
        self._granted &= ~flags

    def _grant(self, everyones: ControlFlags, *, sent: ControlFlags) -> None:
        """Of each exchange: the wishes of all workers, and those of this one that went with it."""
        self._granted |= everyones
        self._wishes &= ~sent  # a signal may have added to them since

    @abstractmethod
    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        """Gives every worker the numbers of all, in worker order. Every worker must call it.

        Args:
            name: what this call is for; equal on all workers.
            numbers: at most 16, as many on every worker; kept in double precision.

        Raises:
            CollectiveError: the workers did not meet at the same call; it says which worker is where.
            ClusterError: a worker was lost, or ended with an error.
        """

    @abstractmethod
    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        """Gives every worker the payloads of all, in worker order; lengths may differ. Every worker must call it."""

    @abstractmethod
    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        """The chief's payload, on every worker; the others' are not looked at. Every worker must call it."""

    @abstractmethod
    def all_reduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The elementwise sums over all workers, the same bits on all of them. Every worker must call it.

        Args:
            name: what this call is for.
            tensors: dense, on any device, of the same shapes and dtypes on every worker. They are not written to.
        """

    @abstractmethod
    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """Every worker's tensor, in worker order, on this one's device. Every worker must call it.

        Args:
            name: what this call is for.
            tensor: of the same dtype on every worker, of shapes that differ in dimension ``axis`` only.
            axis: that dimension.
        """

    @abstractmethod
    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Writes the chief's values into ``tensors``, in place. Every worker must call it with the same shapes."""

    @abstractmethod
    def add_digest(self, digest: int) -> None:
        """Lets a digest of something that must be equal on all workers ride on the next exchange, and be compared.

        Args:
            digest: at most 64 bits. Several are joined, in the order of the calls.
        """

    @abstractmethod
    def set_status(self, text: str) -> None:
        """Notes what this worker does, for the messages of the others should it be lost."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Idempotent."""


class SingleWorkerCommunicator(Communicator):
    """A process by itself: everything is here already.

    Args:
        replicas: how many local replicas it runs.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(0, (replicas,), ("worker 0",))

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        """The numbers alone."""
        wishes = self._wishes
        self._grant(wishes, sent=wishes)
        return [tuple(numbers)]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        """The payload alone."""
        return [payload]

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        """The payload: this is the chief."""
        return payload

    def all_reduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as they are."""
        return list(tensors)

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """The tensor alone."""
        return [tensor]

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing has to be done."""

    def add_digest(self, digest: int) -> None:
        """There is nothing to compare it with."""

    def set_status(self, text: str) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """There is no job to leave."""


R = TypeVar("R")


def all_gather_object(workers: Communicator, name: str, value: Any) -> list[Any]:
    """Gives every worker the values of all, in worker order, tensors on the CPU. Every worker must call it.

    Args:
        workers: this worker's view of all.
        name: what this call is for.
        value: tensors, numbers, texts and None in lists, tuples and dicts.
    """
    if workers.is_single:
        return [value]
    written = io.BytesIO()
    torch.save(value, written)
    return [
        torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        for payload in workers.all_gather_bytes(name, written.getvalue())
    ]


def run_on_chief(workers: Communicator, name: str, act: Callable[[], R]) -> R | None:
    """Lets the chief act, and the others wait until it has. Every worker must call it.

    Returns:
        What ``act`` returned, on the chief; None on the others.

    Raises:
        Exception: on the chief, what ``act`` raised.
        ClusterError: on the others, what the chief could not do.
    """
    result, failed = None, None
    if workers.is_chief:
        try:
            result = act()
        except Exception as error:  # noqa: BLE001  it is raised below, when the others know of it
            failed = error
    told = b"" if failed is None else f"{type(failed).__name__}: {failed}".encode()
    message = workers.broadcast_bytes(name, told).decode()
    if failed is not None:
        raise failed
    if message:
        raise ClusterError(f"{workers.chief_name}, the chief, failed in {name!r} with {message}")
    return result


def check_agreement(workers: Communicator, what: str, lines: Sequence[str]) -> None:
    """Checks that every worker has the same ``lines``. Every worker must call it; all raise the same error.

    Args:
        workers: this worker's view of all.
        what: what the lines describe, for the message: "the model".
        lines: texts without line breaks.

    Raises:
        ClusterError: a worker has other lines than the chief.
    """
    if workers.is_single:
        return
    everyones = [text.decode().split("\n") for text in workers.all_gather_bytes(f"agree on {what}", _joined(lines))]
    for worker, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            pairs = zip_longest(everyones[0], theirs, fillvalue="nothing more")
            chiefs, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ClusterError(
                f"the workers disagree about {what}: {workers.names[0]} has {chiefs or 'nothing'}, "
                f"{workers.names[worker]} has {other or 'nothing'}; run the same program with the same arguments on "
                "every worker"
            )


def _joined(lines: Sequence[str]) -> bytes:
    return "\n".join(lines).encode()


_PACKAGES = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


def call_site() -> str:
    """Such as ``"train.py:30 in step"``; empty in a thread of this package that runs no line of the program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame.f_code.co_filename == threading.__file__:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
