"""Runs that fail and replicas that do not stop: one clear error, soon, and a strategy that goes on afterwards."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here

from lockstep.collectives.per_replica import PerReplica
from lockstep.config import (
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration,
)
from lockstep.errors import ReplicaError, UsageError
from lockstep.replicas import runner
from lockstep.replicas.runner import core_shares
from lockstep.strategies.mirrored import MirroredStrategy

SOON_S = 6.0
CPU = LogicalDevice(
    name="cpu:0",
    kind="CPU",
    physical=PhysicalDevice(name="cpu:0", kind="CPU", memory=None, torch_device=torch.device("cpu")),
    memory_limit=None,
    torch_device=torch.device("cpu"),
)
GPU = replace(CPU, name="gpu:0", kind="GPU")


@dataclass
class FailsWhileOthersLoop:
    """Replica 0 fails as soon as every replica that can is in its endless loop of Python."""

    looping: threading.Semaphore
    others: int

    def __call__(self) -> None:
        if here().replica_id_in_sync_group == 0:
            for _ in range(self.others):
                self.looping.acquire(timeout=10)
            raise ValueError("replica 0 has failed")
        self.looping.release()
        while True:
            pass


def all_are_there(strategy: MirroredStrategy) -> bool:
    numbers = strategy.run(lambda: torch.ones(()))
    return bool(strategy.reduce("sum", numbers) == strategy.num_replicas_in_sync)


@pytest.mark.parametrize(
    ("devices", "cores", "expected"),
    [
        ([CPU], 8, (8,)),
        ([CPU] * 2, 8, (4, 4)),
        ([CPU] * 3, 8, (2, 2, 2)),
        ([CPU] * 4, 2, (1, 1, 1, 1)),
        ([GPU, GPU], 8, (1, 1)),
        ([CPU, GPU], 8, (8, 1)),
    ],
)
def test_the_cores_are_shared_by_the_replicas_of_the_cpu(
    devices: list[LogicalDevice], cores: int, expected: tuple[int, ...]
):
    assert core_shares(devices, cores) == expected


def test_each_replica_has_its_share_and_the_caller_keeps_its_own(make_strategy: MakeStrategy):
    mine = torch.get_num_threads()
    strategy = make_strategy(2)
    counts: list[int] = []
    strategy.run(lambda: counts.append(torch.get_num_threads()))
    assert counts == [max(1, mine // 2)] * 2
    assert torch.get_num_threads() == mine


def test_a_failing_replica_s_own_exception_names_replica_and_device(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    error = LookupError("no such word")

    def step() -> None:
        context = here()
        if context.replica_id_in_sync_group == 1:
            raise error
        context.all_reduce("sum", 1)

    with pytest.raises(LookupError) as caught:
        strategy.run(step)

    assert caught.value is error
    assert caught.value.__notes__ == ["raised in replica 1 (cpu:1)"]
    assert all_are_there(strategy)


class FullError(Exception):
    """An error that takes no note."""

    __notes__ = ()


def test_an_error_that_takes_no_note_keeps_nobody_waiting(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step() -> None:
        context = here()
        if context.replica_id_in_sync_group == 1:
            raise FullError
        context.all_reduce("sum", 1)

    with pytest.raises(FullError):
        strategy.run(step)

    assert all_are_there(strategy)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
def test_any_exception_passes(kind: type[BaseException], make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step() -> None:
        raise kind

    with pytest.raises(kind):
        strategy.run(step)
    assert all_are_there(strategy)


def test_a_replica_in_an_endless_loop_does_not_keep_a_failed_run(two_cores: None, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    began = time.monotonic()
    with pytest.raises(ValueError, match="replica 0 has failed"):
        strategy.run(FailsWhileOthersLoop(threading.Semaphore(0), others=1))
    assert time.monotonic() - began < SOON_S
    assert all_are_there(strategy)


def test_replicas_that_wait_for_a_turn_are_stopped_too(two_cores: None, fresh_devices: object):
    # Of six replicas two issue at a time on one core each: while one loops, four wait for a turn that never comes.
    (cpu,) = list_physical_devices("CPU")
    set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 6)
    strategy = MirroredStrategy(list_logical_devices("CPU"), seed=0)
    entered: list[int] = []

    def loop() -> None:
        context = here()
        entered.append(context.replica_id_in_sync_group)
        while True:
            if len(entered) == 2 and context.replica_id_in_sync_group == entered[0]:
                raise ValueError("the first has failed")

    began = time.monotonic()
    with pytest.raises(ValueError, match="the first has failed"):
        strategy.run(loop)

    assert time.monotonic() - began < SOON_S
    assert len(entered) == 2  # those who got their turn after the failure did not begin
    assert all_are_there(strategy)
    strategy.close()


def test_many_failures_in_a_row_leave_nothing_behind(make_strategy: MakeStrategy):
    strategy = make_strategy(4)

    def step(failing: int) -> None:
        context = here()
        if context.replica_id_in_sync_group == failing:
            raise ValueError("again")
        context.all_reduce("sum", 1)

    for attempt in range(100):
        with pytest.raises(ValueError, match="again"):
            strategy.run(step, (attempt % 4,))
        assert all_are_there(strategy)


def test_an_interrupt_that_was_not_raised_does_not_hit_the_next_job(
    make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    """The replica leaves between the question who is missing and the interrupt: the interrupt stays pending."""
    strategy = make_strategy(2)
    monkeypatch.setattr(runner, "STOP_GRACE_S", 0.0)
    begun, released = threading.Event(), threading.Event()
    interrupt = strategy._runner._threads.interrupt

    def interrupt_after_the_end(replica: int, exception: type[BaseException]) -> None:
        released.set()
        stopped = strategy._runner._stopped
        assert stopped.wait_until_left(10)
        threading.Event().wait(0.05)  # until the thread waits for its next job
        interrupt(replica, exception)

    monkeypatch.setattr(strategy._runner._threads, "interrupt", interrupt_after_the_end)

    def step() -> None:
        if here().replica_id_in_sync_group == 0:
            begun.wait(10)
            raise ValueError("again")
        begun.set()
        released.wait(10)

    with pytest.raises(ValueError, match="again"):
        strategy.run(step)
    assert all_are_there(strategy)


def test_a_replica_that_never_stops_is_named_and_may_still_come_back(
    two_cores: None, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "STOP_GRACE_S", 0.01)
    monkeypatch.setattr(runner, "STOP_LIMIT_S", 0.01)
    strategy = make_strategy(2)
    begun, released = threading.Event(), threading.Event()

    def step() -> None:
        if here().replica_id_in_sync_group == 0:
            begun.wait(20)
            raise ValueError("again")
        begun.set()
        released.wait(20)  # one long call outside Python: no interrupt reaches it

    with pytest.raises(ValueError, match="again"):
        strategy.run(step)
    with pytest.raises(ReplicaError, match=r"replica 1 \(cpu:1\) never stopped after an earlier error; make a new"):
        strategy.run(step)
    released.set()
    stopped = strategy._runner._stopped
    assert stopped.wait_until_left(20)
    assert all_are_there(strategy)


def test_a_closed_strategy_says_so(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    strategy.close()
    strategy.close()
    with pytest.raises(UsageError, match="the strategy has been closed"):
        strategy.run(lambda: None)


def test_runs_from_two_threads_take_turns(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    totals: list[Any] = []

    def many() -> None:
        for value in range(50):
            doubled = strategy.run(lambda x: x * 2, (PerReplica([torch.tensor(value), torch.tensor(value)]),))
            totals.append(int(strategy.reduce("sum", doubled)) == 4 * value)

    threads = [threading.Thread(target=many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert totals == [True] * 100


def test_a_run_keeps_neither_arguments_nor_results(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    given = torch.ones(3)
    returned = strategy.run(lambda value: value + 1, (given,))
    watched = [weakref.ref(given), weakref.ref(returned[0])]
    del given, returned
    strategy.run(lambda: None)
    assert [reference() for reference in watched] == [None, None]
