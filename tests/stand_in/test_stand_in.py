"""The stand-in itself: it finds what it is there to find, and nothing where all is in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.stand_in import StandInDriver, Stream, stand_in_gpus

from lockstep.replicas.device.memory import MB

GPU = torch.device("cpu")


def faults(work: Callable[[StandInDriver, Stream], None]) -> list[str]:
    """What is found in ``work``, which is given a second stream that knows of nothing."""
    with stand_in_gpus((64,)) as (_, driver):
        work(driver, driver.side_stream(GPU, "meeting"))
        found = list(driver.faults)
        driver.faults.clear()
    return found


def ordered(driver: StandInDriver, other: Stream) -> None:
    driver.wait(other, driver.record(driver.current_stream(GPU)))


def test_a_read_before_the_write_it_needs_is_a_fault():
    def work(driver: StandInDriver, other: Stream) -> None:
        value = torch.ones(2)
        with driver.on_stream(other):
            value + 1

    assert faults(work) == ["aten.add.Tensor on meeting reads what caller may not have written yet"]


def test_a_write_before_the_read_that_it_would_spoil_is_a_fault():
    def work(driver: StandInDriver, other: Stream) -> None:
        value = torch.ones(2)
        ordered(driver, other)
        with driver.on_stream(other):
            value + 1
        value.zero_()

    assert faults(work) == ["aten.zero_.default on caller writes what meeting may not have used yet"]


@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_another_stream_may_be_using_must_be_kept_for_it(kept: bool):
    def work(driver: StandInDriver, other: Stream) -> None:
        value = torch.ones(2)
        ordered(driver, other)
        with driver.on_stream(other):
            value + 1
        if kept:
            driver.use_on(value, other)
        del value
        torch.ones(2)

    assert faults(work) == ([] if kept else ["caller uses memory again that meeting may still be using"])


def test_what_is_found_fails_the_test_that_did_it():
    machine = stand_in_gpus((64,))
    _, driver = machine.__enter__()
    driver.faults.append("something")
    with pytest.raises(AssertionError, match="something"):
        machine.__exit__(None, None, None)


def test_a_view_is_no_use_and_a_wait_of_the_host_orders_all():
    with stand_in_gpus((64,)) as (_, driver):
        driver.lags = True
        value = torch.ones(2, 3)
        event = driver.record(driver.current_stream(GPU))
        assert not driver.query(event)
        with driver.on_stream(driver.side_stream(GPU, "meeting")):
            view = value.t()
        driver.synchronize(event)
        assert driver.query(event)
        with driver.on_stream(driver.side_stream(GPU, "meeting")):
            view + 1

    assert driver.waits == 1


def test_pools_count_bytes_and_the_device_ends():
    with stand_in_gpus((64,), memory_mb=128) as (_, driver):
        held = torch.empty(50 * MB, dtype=torch.uint8)
        part = held[: 10 * MB]
        del held
        assert driver.whole(GPU).in_use == 50 * MB  # the part keeps all of it
        del part
        assert (driver.whole(GPU).in_use, driver.peak(GPU), driver.whole(GPU).reserved) == (0, 50 * MB, 50 * MB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(200 * MB, dtype=torch.uint8)
