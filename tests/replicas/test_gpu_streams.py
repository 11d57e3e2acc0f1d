"""Turns on a GPU, on the stand-in: order, random numbers, memory. No strategy; the test's thread is every replica's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.stand_in import StandInDriver, stand_in_gpus

from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, DeviceMemoryError
from lockstep.replicas.device.memory import MB
from lockstep.replicas.device.streams import GpuReplica, GpuSlot, RunStreams, allocating_on
from lockstep.replicas.issue_gate import IssueGate


def turns_on(devices: Sequence[LogicalDevice], driver: StandInDriver, rows: int | None = None) -> list[GpuSlot]:
    gate = IssueGate(1)
    return [GpuSlot(gate, GpuReplica(device, driver, seed), rows) for seed, device in enumerate(devices)]


def drawn(order: Sequence[int]) -> dict[int, list[list[float]]]:
    """What each replica draws when they have their turns in this order."""
    numbers: dict[int, list[list[float]]] = {number: [] for number in order}
    with stand_in_gpus((64,) * 3) as (devices, driver):
        turns = turns_on(devices, driver)
        for number in order:
            turns[number].acquire()
            numbers[number].append(torch.rand(4).tolist())
            turns[number].release()
    return numbers


def test_what_a_replica_draws_does_not_depend_on_the_order_of_turns():
    first = drawn([0, 1, 2, 0, 1, 2])
    assert drawn([2, 2, 1, 0, 0, 1]) == first
    assert first[0][0] != first[0][1] != first[1][0]


def test_outside_turns_and_aside_the_caller_s_numbers_are_drawn():
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    with stand_in_gpus((64,)) as (devices, driver):
        (turn,) = turns_on(devices, driver)
        numbers = [torch.rand(1)]
        turn.acquire()
        torch.rand(5)
        with turn.with_default_rng():
            numbers.append(torch.rand(1))
        own = torch.rand(1)
        turn.release()
        numbers.append(torch.rand(1))

    assert torch.cat(numbers).tolist() == expected
    assert own.item() not in expected


def test_a_turn_issues_on_the_share_s_stream_and_the_others_see_a_mark_of_it():
    with stand_in_gpus((64, 64)) as (devices, driver):
        first, second = turns_on(devices, driver)
        first.acquire()
        made = torch.ones(3) * 2
        mark = first.record_event()
        first.release()
        assert driver.current_stream(torch.device("cpu")).name == "caller"

        second.acquire()
        mark.wait()
        assert float((made + 1).sum()) == 9.0  # without the mark a fault
        end = second.record_event()
        second.release()
        end.wait()

    assert [entry.on for entry in driver.calls("on_stream")] == ["gpu:0", "gpu:1"]
    assert [(entry.replica, entry.on.split("@")[0]) for entry in driver.calls("wait")] == [
        ("gpu:1", "gpu:1 for gpu:0"),
        ("caller", "caller for gpu:1"),
    ]
    assert driver.waits == 0


def test_a_run_stands_between_what_its_caller_queues_before_and_after():
    with stand_in_gpus((64, 64)) as (devices, driver):
        turns = turns_on(devices, driver)
        before, results, marks = torch.ones(3), [], []
        with RunStreams(devices) as streams:
            for turn in turns:
                turn.acquire()
                results.append(before * 2)
                marks.append(turn.record_event())
                turn.release()
            with streams.after(marks):
                total = results[0] + results[1]
            behind = streams.record_events()
            for turn in turns:
                turn.acquire()
                for event in behind:
                    event.wait()
                results.append(total * 2)
                turn.release()
        assert float(total.sum() + results[3].sum()) == 36.0

    meeting = [entry.on for entry in driver.calls("wait") if entry.replica == "meeting"]
    assert [on.split("@")[0] for on in meeting] == ["meeting for gpu:0", "meeting for gpu:1"]


def test_the_limit_holds_for_what_tensors_took_and_not_for_room_that_is_kept():
    with stand_in_gpus((64,)) as (devices, driver):
        (turn,) = turns_on(devices, driver, rows=8)
        turn.acquire()
        with turn.with_default_rng(), driver.on_stream(driver.side_stream(torch.device("cpu"), "meeting")):
            torch.empty(100 * MB, dtype=torch.uint8)  # made for all, which is not this share's
        torch.empty(50 * MB, dtype=torch.uint8)
        driver.memory.keep("gpu:0", 30 * MB)
        turn.check()
        assert driver.calls("release_cached") != []

        torch.empty(80 * MB, dtype=torch.uint8)
        with pytest.raises(DeviceMemoryError, match=r"gpu:0 has a memory_limit of 64 MB, but the step took 80 MB"):
            turn.check()
        turn.release()


def test_memory_is_looked_at_only_when_a_pool_has_another_size():
    with stand_in_gpus((64,)) as (devices, driver):
        (turn,) = turns_on(devices, driver)
        for _ in range(5):
            turn.acquire()
            torch.empty(10 * MB, dtype=torch.uint8)
            turn.check()
            turn.release()
    assert len(driver.calls("pool")) == 1


def test_what_is_made_in_the_memory_of_a_device_is_counted_there():
    with stand_in_gpus((64, 64)) as (devices, driver):
        with allocating_on(devices[1]):
            held = torch.empty(6 * MB, dtype=torch.uint8)
        held += 1
        sizes = [GpuReplica(device, driver, seed=0).account.memory() for device in devices]

    assert [(size.name, size.limit, size.in_use, size.peak) for size in sizes] == [
        ("gpu:0", 64 * MB, 0, 0),
        ("gpu:1", 64 * MB, 6 * MB, 6 * MB),
    ]


def test_an_allocator_that_keeps_shares_together_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StandInDriver, "limits_pools", lambda _: False)
    with stand_in_gpus((64,)) as (devices, driver), pytest.raises(ConfigError, match="gpu:0 has a memory_limit, and"):
        turns_on(devices, driver)
    with stand_in_gpus(None) as (devices, driver):
        turns_on(devices, driver)


def test_at_the_end_of_a_run_that_failed_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    with stand_in_gpus((64, 64)) as (devices, driver):
        run = RunStreams(devices)
        monkeypatch.setattr(driver, "record", refuse)
        run.__exit__(ValueError, ValueError("operation not permitted when stream is capturing"), None)
        with pytest.raises(RuntimeError, match="previous error"):
            run.__exit__(None, None, None)
