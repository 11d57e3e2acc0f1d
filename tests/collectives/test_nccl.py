"""What is ours of NCCL's groups, without any: that waits end, and in what order groups are broken off and ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.collectives import process_group
from lockstep.collectives.process_group import ProcessGroup
from lockstep.errors import ClusterError, CollectiveError
from lockstep.membership.membership import Membership

GPU = torch.device("cuda", 0)
LIMIT_S = 20.0


class Work:
    """An operation that is done when it has been asked for so often."""

    def __init__(self, asked: float) -> None:
        self.asked, self.waits = asked, 0

    def is_completed(self) -> bool:
        self.asked -= 1
        return self.asked < 0

    def wait(self) -> None:
        self.waits += 1


class Backend:
    """A group of one, which writes down what it was asked."""

    def __init__(self, work: Work | None = None) -> None:
        self.calls: list[str] = []
        self.aborted = threading.Event()
        self.work = work or Work(3)

    def allreduce(self, _: list[torch.Tensor]) -> Work:
        self.calls.append("allreduce")
        return self.work

    def abort(self) -> None:
        self.calls.append("abort")
        self.aborted.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Member:
    """A membership whose end the test decides."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(num_workers=2, index=0)
        self.subscribed: list[Callable[[ClusterError], None]] = []
        self.lost: ClusterError | None = None

    def store(self, prefix: str) -> str:
        return prefix

    def run_with_watchdog(self, call: Callable[[], Any], waiting_in: str) -> Any:
        return call()

    def subscribe(self, callback: Callable[[ClusterError], None]) -> None:
        self.subscribed.append(callback)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def describe_other_statuses(self) -> str:
        return "worker 1 was last in a run of step"

    def lose(self) -> None:
        self.lost = ClusterError("worker 1 (b:1) was lost")
        for callback in self.subscribed:
            callback(self.lost)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ProcessGroup, Backend, Member]]:
    def made(work: Work | None = None, timeout_s: float = LIMIT_S) -> tuple[ProcessGroup, Backend, Member]:
        backend, member = Backend(work), Member()
        monkeypatch.setattr(process_group, "connect_nccl", lambda *_, **__: backend)
        group = ProcessGroup(cast(Membership, member), "gradients", gpu=GPU, timeout_s=timeout_s)
        return group, backend, member

    return made


def test_a_wait_ends_when_the_gpu_is_done_and_what_follows_is_queued_behind_it():
    work = Work(5)
    assert process_group.is_done(cast(Any, work), timedelta(seconds=LIMIT_S))
    assert work.waits == 1
    assert not process_group.is_done(cast(Any, Work(float("inf"))), timedelta(milliseconds=5))


def test_a_group_that_was_waited_for_is_shut_down(make: Callable[..., tuple[ProcessGroup, Backend, Member]]):
    group, backend, _ = make()
    group.wait(group.start_sum([torch.ones(2)]), "a sum")
    group.close()
    group.close()
    assert backend.calls == ["allreduce", "shutdown"]


def test_one_whose_worker_was_lost_is_aborted_and_left_to_the_end_of_the_process(
    make: Callable[..., tuple[ProcessGroup, Backend, Member]],
):
    group, backend, member = make(Work(float("inf")))
    work = group.start_sum([torch.ones(2)])
    member.lose()
    with pytest.raises(ClusterError, match="worker 1"):
        group.wait(work, "a sum")
    assert backend.aborted.wait(LIMIT_S)
    group.close()
    assert backend.calls == ["allreduce", "abort"]


def test_sums_that_an_abort_ended_are_not_taken_for_sums(make: Callable[..., tuple[ProcessGroup, Backend, Member]]):
    group, backend, member = make(Work(0))  # it looks done, as everything does whose kernels were aborted
    work = group.start_sum([torch.ones(2)])
    member.lose()
    with pytest.raises(ClusterError, match="worker 1"):
        group.wait(work, "a sum")
    assert backend.aborted.wait(LIMIT_S)


def test_a_worker_that_is_alive_and_does_not_come_is_named(make: Callable[..., tuple[ProcessGroup, Backend, Member]]):
    group, _, _ = make(Work(float("inf")), timeout_s=0.01)
    with pytest.raises(CollectiveError, match=r"nothing came for 0.01 s in a sum.*worker 1 was last in a run of step"):
        group.wait(group.start_sum([torch.ones(2)]), "a sum")


def test_ending_is_given_up_where_others_do_not_end(monkeypatch: pytest.MonkeyPatch):
    others = threading.Event()
    assert process_group.ends_in_time(lambda: None)
    monkeypatch.setattr(process_group, "_END_LIMIT_S", 0.01)
    assert not process_group.ends_in_time(lambda: others.wait(LIMIT_S) and None)
    others.set()


def test_all_groups_are_aborted_whatever_becomes_of_one():
    first, second = Backend(), Backend()

    def ended_already() -> None:
        raise RuntimeError("NCCL communicator was aborted")

    first.abort = ended_already  # type: ignore[method-assign]
    process_group.abort([first, second])
    assert second.aborted.wait(LIMIT_S)
