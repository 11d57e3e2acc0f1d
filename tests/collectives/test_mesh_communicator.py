"""Replicas of several workers each, seen as one worker a replica: values come from those who speak."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from lockstep.collectives.communicator import (
    Communicator,
    ControlFlags,
    MeshCommunicator,
    all_gather_object,
    run_on_chief,
)
from lockstep.parallel.mesh_layout import MeshLayout

GRID = MeshLayout(data=2, pipeline=2)


class ThreadJob(Communicator):
    """Four workers as four threads."""

    def __init__(self, index: int, table: dict[int, Any], barrier: Barrier) -> None:
        super().__init__(index, (1,) * 4, [f"worker {each}" for each in range(4)])
        self._table, self._barrier = table, barrier

    def _all(self, value: Any) -> list[Any]:
        self._table[self.index] = value
        self._barrier.wait(10)
        found = [self._table[index] for index in range(4)]
        self._barrier.wait(10)
        return found

    def all_gather_numbers(self, name: str, numbers: Any = ()) -> list[tuple[float, ...]]:
        wishes = self._own_flags
        met = self._all((tuple(numbers), wishes))
        self._receive_flags(ControlFlags(sum({int(each) for _, each in met})), requests=wishes)
        return [numbers for numbers, _ in met]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        return self._all(payload)

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        return self._all(payload)[0]

    def all_reduce(self, name: str, tensors: Any) -> list[torch.Tensor]:
        return [torch.stack(each).sum(0) for each in zip(*self._all(list(tensors[0])), strict=True)]

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        return self._all(tensor)

    def broadcast(self, name: str, tensors: Any) -> None:
        raise NotImplementedError

    def add_digest(self, digest: int) -> None:
        raise NotImplementedError

    def set_status(self, text: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def on_all(act: Callable[[MeshCommunicator], Any]) -> list[Any]:
    """What ``act`` gives on each of the workers: stage 0 of both replicas, then stage 1, which speaks."""
    table: dict[int, Any] = {}
    barrier = Barrier(4)

    def body(index: int) -> Any:
        replica = GRID.coordinate(index).replica
        job = ThreadJob(index, table, barrier)
        return act(MeshCommunicator(job, replica=replica, leaders=GRID.leaders(GRID.pipeline - 1), chief=index == 0))

    with ThreadPoolExecutor(4, thread_name_prefix="worker") as pool:
        return list(pool.map(body, range(4)))


def test_a_replica_is_one_worker():
    seen = on_all(lambda workers: (workers.size, workers.index, workers.num_replicas, workers.first_replica))
    assert seen == [(2, 0, 2, 0), (2, 1, 2, 1)] * 2
    assert on_all(lambda workers: workers.is_chief) == [True, False, False, False]
    assert on_all(lambda workers: workers.is_single) == [False] * 4


def test_what_adds_up_counts_each_replica_once_and_those_who_do_not_know_learn_it():
    def loss(workers: MeshCommunicator) -> Any:
        own = [float(10 * workers.index + 1)] if workers.is_leader else [float("nan")]
        total = torch.tensor(own)
        return (
            workers.all_gather_numbers("loss", own),
            all_gather_object(workers, "metric", {"total": own[0]} if workers.is_leader else None),
            workers.all_reduce("sum", [[torch.nan_to_num(total, 99.0)]])[0].item(),
            [each.tolist() for each in workers.all_gather("rows", total, 0)],
        )

    expected = ([(1.0,), (11.0,)], [{"total": 1.0}, {"total": 11.0}], 12.0, [[1.0], [11.0]])
    assert on_all(loss) == [expected] * 4


def test_the_chief_is_heard_though_it_does_not_speak():
    def act(workers: MeshCommunicator) -> Any:
        return run_on_chief(workers, "write", lambda: "written")

    assert on_all(act) == ["written", None, None, None]


def test_a_wish_of_any_worker_is_granted_on_all():
    def wish(workers: MeshCommunicator) -> ControlFlags:
        if workers.index == 1 and not workers.is_leader:
            workers.set_flags(ControlFlags.STOP)
        workers.all_gather_numbers("end of a batch")
        return workers.agreed_flags

    assert on_all(wish) == [ControlFlags.STOP] * 4
