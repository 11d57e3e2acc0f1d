"""The collectives between the workers of a job: sums, gathers and broadcasts.

    worker 0                        worker 1
    its replicas: sums of nodes     its replicas: sums of nodes     (of the tree of additions, ``sum_order``)
             `--- all_reduce, all_gather, broadcast ---'            every worker makes the same calls, in one order

``SingleWorkerCommunicator`` is for a process by itself, ``collectives.distributed`` for several, ``MeshCommunicator``
for processes that hold a replica of the model together. Calls are made outside replicas, or by the one replica that
runs the ``combine`` of a barrier. Received objects are read with ``weights_only``, so they cannot run code.
"""

from __future__ import annotations

import enum
import io
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar, get_args

import torch

from lockstep.checks import ABOVE_ZERO, check_choice, check_number, check_seconds
from lockstep.cluster.spec import Task
from lockstep.collectives.sum_order import add_nodes, nodes_within, sums_within
from lockstep.errors import CheckpointError, ClusterError, UsageError
from lockstep.tracebacks import LOCKSTEP_FOLDERS

R = TypeVar("R")


class ControlFlags(enum.IntFlag):
    """Actions that all workers take together as soon as one of them asks."""

    LOGS = 1
    """Merge the metrics of this batch: some callback shows them."""
    STOP = 2
    """End the training after this batch."""
    SAVE = 4
    """Write a checkpoint after this batch."""


class Communicator(ABC):
    """One worker's access to the collectives of all workers, who must all make the same calls in one order.

    Args:
        index: the number of this worker, from 0.
        replicas: the number of local replicas of each worker, in worker order.
        names: the names of the workers in messages, such as "worker 1 (hostb:20001)".
        single: whether no other process takes part; by default, whether there is one worker.
        chief: whether this worker prints, logs and publishes checkpoints; by default, whether ``index`` is 0.
        leaders: per worker, the number in ``processes`` of the process whose values count; by default, the worker's.
        layout: how the processes of a worker divide the model among them; empty if they do not.
        any_layout: whether the number of replicas was given, so that no number may depend on how they are laid on
            workers and devices.
        task: the role of this process; an evaluator is never the chief.

    Attributes:
        leads: whether this worker reads for all and sends what it has read: the chief, and an evaluator by itself.
        nodes: for each worker, the largest nodes of the tree of additions within its replicas.
    """

    def __init__(
        self,
        index: int,
        replicas: Sequence[int],
        names: Sequence[str],
        *,
        single: bool | None = None,
        chief: bool | None = None,
        leaders: Sequence[int] | None = None,
        layout: str = "",
        any_layout: bool = False,
        task: Task = "worker",
    ) -> None:
        self.index = index
        self.replicas, self.names = tuple(replicas), tuple(names)
        self.size, self.num_replicas = len(self.replicas), sum(self.replicas)
        self.first_replica = sum(self.replicas[:index])  # this worker's first among those of all workers
        # Every worker computes the nodes of all, so a record need not say what its numbers are sums of.
        blocks = pairwise(accumulate(self.replicas, initial=0))
        self.nodes = tuple(nodes_within(*block, self.num_replicas) for block in blocks)
        self.any_layout = any_layout
        self.is_single = self.size == 1 if single is None else single
        self.task = task
        self.leads = index == 0 if chief is None else chief
        self.is_chief = self.leads and task == "worker"
        self.leaders = tuple(range(self.size) if leaders is None else leaders)
        self.layout = layout
        self._own_flags = self._agreed_flags = ControlFlags(0)
        self._draws: tuple[int, Callable[[], object]] = (0, lambda: None)

    @property
    def processes(self) -> Communicator:
        """The communicator of all processes; another than this one where a worker is several processes."""
        return self

    def set_flags(self, flags: ControlFlags) -> None:
        """Asks for actions; the next collective of any kind tells all workers."""
        self._own_flags |= flags

    @property
    def agreed_flags(self) -> ControlFlags:
        """The flags of all workers up to the last collective, less those cleared; equal on every worker."""
        return self._agreed_flags

    def clear_flags(self, flags: ControlFlags) -> None:
        """Clears flags that have been acted on. Every worker must call it at the same point of the program."""
        if self._agreed_flags:
            self._agreed_flags &= ~flags

    def _receive_flags(self, flags: ControlFlags, *, requests: ControlFlags) -> None:
        self._agreed_flags |= flags
        # Only these: a signal handler may have set others since they were sent
        # (tests/collectives/test_communicator.py).
        self._own_flags &= ~requests

    @abstractmethod
    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        """Gathers at most 64 numbers of every worker, in worker order and double precision.

        ``name`` is the purpose of the call, equal on all workers, as for all collectives.

        Raises:
            CollectiveError: the workers are not at the same call; the message says which worker is where.
            ClusterError: a worker was lost, or ended with an error.
        """

    @abstractmethod
    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        """Gathers the payload of every worker, in worker order; lengths may differ."""

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        """Gives every worker the chief's payload; others' payloads are ignored."""
        return self.all_gather_bytes(name, payload if self.leads else b"")[0]

    def sum_numbers(self, name: str, rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Adds numbers of all replicas, in double precision and the order of ``sum_order``.

        ``rows`` has the numbers of each local replica, as many from each.
        """

        def add(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(a + b for a, b in zip(one, other, strict=True))

        local_sums = sums_within([tuple(row) for row in rows], self.first_replica, self.num_replicas, add)
        width, most = len(rows[0]), max(map(len, self.nodes))
        # Filled up with zeros: workers have different numbers of nodes, and a record's numbers are as many on all
        # workers. Sums are sent by node and not by worker, so that they are added in one order on every layout.
        payload = [number for _, row in local_sums for number in row] + [0.0] * ((most - len(local_sums)) * width)
        parts = [
            (node, numbers[place * width : (place + 1) * width])
            for nodes, numbers in zip(self.nodes, self.all_gather_numbers(name, payload), strict=True)
            for place, node in enumerate(nodes)
        ]
        ((_, total),) = add_nodes(parts, self.num_replicas, add)
        return total

    @abstractmethod
    def all_reduce(self, name: str, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The elementwise sums over all replicas, with the same bits on all workers, of dense tensors.

        ``parts`` has the sums over the replicas of each of this worker's ``nodes``: lists of tensors of the same shapes
        on all workers.
        """

    @abstractmethod
    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """Gathers a tensor of every worker, in worker order; shapes may differ in dimension ``axis`` only."""

    @abstractmethod
    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Writes the chief's values into ``tensors``, in place; their shapes are equal on all workers."""

    @abstractmethod
    def add_digest(self, digest: int) -> None:
        """Has the next collective compare 64 bits that must be equal on all workers; several are combined in order."""

    def compare_draws(self, digest: int, when_same: Callable[[], object]) -> None:
        """Has the next collective compare 32 bits of what each worker draws, and call ``when_same`` if two are equal.

        Other digests must be equal on all workers; these should differ. 0 stands for no draws. Processes that hold one
        replica together may draw alike, so only workers that each have whole replicas compare them.
        """
        self._draws = digest, when_same

    @abstractmethod
    def set_status(self, text: str) -> None:
        """Sets what this worker does now. Other workers name it in their messages if this one is lost."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Idempotent."""


class SingleWorkerCommunicator(Communicator):
    """The communicator of a process by itself: each collective returns its argument."""

    def __init__(self, replicas: int, *, any_layout: bool = False, task: Task = "worker") -> None:
        name = "worker 0" if task == "worker" else f"the {task}"
        super().__init__(0, (replicas,), (name,), any_layout=any_layout, task=task)

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        # Read once: a signal handler may set others meanwhile.
        if flags := self._own_flags:  # operators of flags take 1 us each
            self._receive_flags(flags, requests=flags)
        return [tuple(numbers)]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        return [payload]

    def all_reduce(self, name: str, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        (whole,) = parts
        return list(whole)

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        return [tensor]

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None: ...

    def add_digest(self, digest: int) -> None: ...

    def set_status(self, text: str) -> None: ...

    def close(self) -> None: ...


def all_gather_object(workers: Communicator, name: str, value: Any) -> list[Any]:
    """Gathers a value of every worker (lists, tuples and dicts of tensors, numbers, strings and None), on the CPU."""
    if workers.is_single:
        return [value]
    # Not pickle: weights_only reads tensors and plain values, and runs no code of another worker's.
    written = io.BytesIO()
    torch.save(value, written)
    return [
        torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        for payload in workers.all_gather_bytes(name, written.getvalue())
    ]


def run_on_chief(workers: Communicator, name: str, act: Callable[[], R]) -> R | None:
    """Runs ``act`` on the chief while the others wait; None on the others, who get a ClusterError if it fails."""
    # An error is sent before it is raised: workers that wait for the chief's message would wait until their time limit.
    result, failed = None, None
    try:
        result = act() if workers.leads else None
    except Exception as error:  # noqa: BLE001  raised below, once the others know of it
        failed = error
    report = b"" if failed is None else f"{type(failed).__name__}: {failed}".encode(errors="backslashreplace")
    message = workers.broadcast_bytes(name, report).decode()
    if failed is not None:
        raise failed
    if message:
        raise ClusterError(f"{workers.names[0]}, the chief, failed in {name!r} with {message}")
    return result


def evaluator_error(caller: str) -> UsageError:
    """The error of ``caller``, which would train a second model in an evaluator."""
    return UsageError(
        f"{caller} was asked for in an evaluator, which takes no part in the training and would train a second model; "
        "train where strategy.task is 'worker', and here load what the chief has saved and evaluate it: "
        "model.load_weights(path) or model.load_checkpoint(folder), then model.evaluate(data)"
    )


def refuse_to_train(workers: Communicator, caller: str) -> None:
    """Raises a UsageError in an evaluator."""
    if workers.task == "evaluator":
        raise evaluator_error(caller)


def refuse_to_save(workers: Communicator, caller: str) -> None:
    """Raises a UsageError in an evaluator, where ``caller`` would write over the chief's files."""
    if workers.task == "evaluator":
        raise UsageError(
            f"{caller} was called in an evaluator, whose weights are those that it has loaded, and could replace "
            "the chief's file; save where strategy.task is 'worker', and here copy the file that was loaded "
            "(shutil.copy) to keep it"
        )


def error_text(act: Callable[[], object]) -> str:
    """Calls ``act``, which may fail on any worker, and returns the text of its error; empty if there was none.

    ``raise_gathered_errors`` then raises it on all workers, so that none goes on alone.
    """
    try:
        act()
    except Exception as error:  # noqa: BLE001  all workers raise it as soon as they know of it
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return ""


def raise_gathered_errors(workers: Communicator, name: str, error: str) -> None:
    """Raises on all workers a CheckpointError of the first ``error`` that is not empty. All must call it."""
    for index, payload in enumerate(workers.all_gather_bytes(name, error.encode())):
        if text := payload.decode():
            raise CheckpointError(text if workers.is_single else f"{workers.names[index]}: {text}")


def check_agreement(workers: Communicator, what: str, lines: Sequence[str]) -> None:
    """Raises a ClusterError on all workers, with the first difference, unless all have the chief's ``lines``."""
    if workers.is_single:
        return
    gathered = workers.all_gather_bytes(f"agree on {what}", "\n".join(lines).encode())
    expected, *answers = [text.decode().split("\n") for text in gathered]
    for name, answer in zip(workers.names[1:], answers, strict=True):
        if answer != expected:
            pairs = zip_longest(expected, answer, fillvalue="nothing more")
            chiefs, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ClusterError(
                f"the workers disagree about {what}: {workers.names[0]} has {chiefs or 'nothing'}, "
                f"{name} has {other or 'nothing'}; run the same program with the same arguments on every worker"
            )


_PACKAGES = (*LOCKSTEP_FOLDERS, str(Path(torch.__file__).parent) + os.sep)


def calling_frame() -> FrameType | None:
    """The nearest frame outside this package and torch; None if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    # A replica's thread begins in threading.py, which is no line of the user's.
    return None if frame.f_code.co_filename == threading.__file__ else frame


def call_site() -> str:
    """The user's line that called a collective: the nearest outside this package and torch; empty if there is none."""
    frame = calling_frame()
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno} in {frame.f_code.co_name}"


T = TypeVar("T")


class MeshCommunicator(Communicator):
    """Shows each replica of a model that several processes hold together as one worker.

    All processes take part in each collective, but only the leaders' values count. So a sum counts each replica once,
    and a process that does not know a value, such as a stage that never sees the loss, learns it.

    Args:
        job: the communicator of all processes.
        replica: the replica that this process is part of.
        leaders, chief, layout: see ``Communicator``.
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
            replica,
            (1,) * len(leaders),
            names,
            single=job.size == 1,
            chief=chief,
            leaders=leaders,
            layout=layout,
            task=job.task,
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

    def all_reduce(self, name: str, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        # Zeros of the others keep the sum that of the leaders, each replica counted once
        # (tests/collectives/test_mesh_communicator.py).
        (tensors,) = parts
        return self._job.all_reduce(
            name, [tensors if self.is_leader else [torch.zeros_like(tensor) for tensor in tensors]]
        )

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
        requests = self._own_flags
        self._job.set_flags(requests)
        gathered = gather()
        # The job's flags are cleared, since this communicator keeps what is agreed; otherwise each later collective
        # would bring them back after they have been acted on.
        agreed = self._job.agreed_flags
        self._job.clear_flags(agreed)
        self._receive_flags(agreed, requests=requests)
        return [gathered[leader] for leader in self.leaders]


Compression = Literal["bf16"]


@dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """The settings of the communication between workers; equal on all of them.

    Args:
        bucket_mb: size of the largest gradient bucket, in MB (2**20 bytes).
        compression: "bf16" sends float32 gradients in bfloat16, half the bytes, with its rounding.
        lost_after_s: seconds without a heartbeat after which a worker counts as lost.
        timeout_s: seconds that a worker or replica waits in a collective for one that is alive and does not come.

    Raises:
        ConfigError: a number that is not above 0, or an unknown compression.

    Example:
        >>> import lockstep as ls
        >>> options = ls.CommunicationOptions(compression="bf16", lost_after_s=60)
    """

    bucket_mb: float = 25.0
    compression: Compression | None = None
    lost_after_s: float = 15.0
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        check_number("bucket_mb", self.bucket_mb, least=ABOVE_ZERO, optional=False)
        check_choice("compression", self.compression, (*get_args(Compression), None))
        check_seconds("lost_after_s", self.lost_after_s)
        check_seconds("timeout_s", self.timeout_s)

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @property
    def travel_as(self) -> torch.dtype | None:
        return torch.bfloat16 if self.compression == "bf16" else None
