"""A group of workers without processes: threads that meet at a barrier and lay their records side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lockstep.collectives.communicator import Communicator
from lockstep.collectives.distributed import CallRecord, check_same_call

LIMIT_S = 30.0


class Group:
    """Where the threads meet."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self.replicas = tuple(replicas)
        self.names = [f"worker {index}" for index in range(len(replicas))]
        self.calls: list[str] = []
        self._table: list[Any] = [None] * len(replicas)
        self._barrier = threading.Barrier(len(replicas), timeout=LIMIT_S)

    def meet(self, index: int, value: Any) -> list[Any]:
        self._table[index] = value
        self._barrier.wait()
        values = list(self._table)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()


class ThreadWorkers(Communicator):
    """One thread's view of the group; what it does not need for data is not there."""

    def __init__(self, group: Group, index: int, *, any_layout: bool = False) -> None:
        super().__init__(index, group.replicas, group.names, any_layout=any_layout)
        self.group = group
        self.sequence = self.digest = 0

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        mine = CallRecord(name=name, sequence=self.sequence, numbers=tuple(map(float, numbers)), digest=self.digest)
        records = self.group.meet(self.index, mine)
        if self.is_chief:
            self.group.calls.append(name)
        check_same_call(records, self.names)
        self.sequence, self.digest = self.sequence + 1, 0
        return [record.numbers for record in records]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        self.all_gather_numbers(name)
        return self.group.meet(self.index, payload)

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        return self.all_gather_bytes(name, payload)[0]

    def all_reduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        raise NotImplementedError

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError

    def add_digest(self, digest: int) -> None:
        self.digest = hash((self.digest, digest)) & (2**63 - 1)

    def set_status(self, text: str) -> None:
        pass

    def close(self) -> None:
        """Its thread ends by itself."""


RunWorkers = Callable[..., list[Any]]


@pytest.fixture
def run_workers(monkeypatch: pytest.MonkeyPatch) -> RunWorkers:
    """A function that runs ``fn(workers, *args)`` for each worker in a thread of its own, and gives their results.

    The first worker's error is raised, as a note of the others'.
    """
    fork, forking = os.fork, threading.Lock()

    def fork_alone() -> int:
        """Forks when no other worker does: filelock, which transformers imports, refuses two forks at once."""
        with forking:
            return fork()

    monkeypatch.setattr(os, "fork", fork_alone)

    def run(replicas: Sequence[int], fn: Callable[..., Any], *args: Any) -> list[Any]:
        group = Group(replicas)

        def body(index: int) -> Any:
            try:
                return fn(ThreadWorkers(group, index), *args)
            except BaseException:
                group.abort()
                raise

        with ThreadPoolExecutor(len(replicas), thread_name_prefix="worker") as pool:
            futures = [pool.submit(body, index) for index in range(len(replicas))]
        errors = [error for future in futures if (error := future.exception())]
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return [future.result() for future in futures]

    return run
