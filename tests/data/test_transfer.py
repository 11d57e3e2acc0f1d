"""Batches on their way to the devices: nothing moves on a CPU; to a GPU they go by events, and nobody waits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.stand_in import stand_in_gpus

from lockstep.collectives.per_replica import PerReplica
from lockstep.config import LogicalDevice, PhysicalDevice
from lockstep.config.devices import discover_physical_devices
from lockstep.data.dataset import DistributedDataset
from lockstep.data.transfer import Transfer


def device(name: str, torch_device: str) -> LogicalDevice:
    physical = PhysicalDevice(name=name, kind="CPU", memory=None, torch_device=torch.device(torch_device))
    return LogicalDevice(
        name=name, kind="CPU", physical=physical, memory_limit=None, torch_device=physical.torch_device
    )


def test_on_the_cpu_nothing_is_copied():
    values = [torch.ones(2), torch.zeros(2)]
    transfer = Transfer([device("cpu:0", "cpu"), device("cpu:1", "cpu")])
    moved = transfer({"x": PerReplica(values)})
    assert all(given is got for given, got in zip(values, moved["x"], strict=True))
    batches: Any = iter([moved])
    assert transfer.received(batches) is batches


def test_every_value_goes_to_its_own_replicas_device():
    batch = ({"x": PerReplica([torch.ones(2, 3)] * 2)}, PerReplica(["text", None]))
    moved = Transfer([device("cpu:0", "cpu"), device("cpu:1", "meta")])(batch)
    assert [value.device.type for value in moved[0]["x"]] == ["cpu", "meta"]
    assert moved[0]["x"][1].shape == (2, 3)
    assert moved[1].values == ("text", None)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_gpus_batches_are_copied_beside_and_handed_over_by_events(prefetch: int):
    rows = [torch.full((4,), float(number)) for number in range(5)]
    sums = []
    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        for batch in DistributedDataset(rows, devices, prefetch=prefetch):
            sums.append(torch.stack(list(batch)).sum())  # in order behind the copies, or the stand-in complains
            (handed,) = [entry.on for entry in driver.calls("wait")][-1:]
            assert handed.startswith("caller for copy@")
        assert driver.waits == 0
        assert {entry.replica for entry in driver.calls("to_device")} <= {"caller"}  # asked by a thread of no replica
    assert [float(each) for each in sums] == [4.0 * number for number in range(5)]


def test_a_copy_that_nobody_has_received_is_not_there_yet():
    with stand_in_gpus() as (devices, driver):
        torch.stack(list(Transfer(devices)(PerReplica([torch.ones(2), torch.ones(2)]))))
        assert "reads what copy may not have written yet" in driver.faults[0]
        driver.faults.clear()


def test_pinned_memory_is_not_copied_once_more_and_kept_until_it_is_copied():
    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        transfer = Transfer(devices)
        pinned, plain = torch.ones(4), torch.zeros(4)
        driver.pinned_memory.add(pinned.untyped_storage().data_ptr())
        first = PerReplica(pinned.split(2))
        parts = [weakref.ref(part) for part in first]

        transfer(first)
        assert not driver.calls("pinned")
        del first
        transfer(PerReplica(plain.split(2)))
        assert len(driver.calls("pinned")) == 2
        gc.collect()
        assert all(part() is not None for part in parts)

        driver.catch_up()
        transfer(PerReplica(plain.split(2)))
        gc.collect()
        assert all(part() is None for part in parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_what_reaches_a_gpu_is_complete_and_stays_while_it_is_read(pinned: bool):
    physical = discover_physical_devices()[1]
    gpu = LogicalDevice(
        name="gpu:0", kind="GPU", physical=physical, memory_limit=None, torch_device=physical.torch_device
    )
    rows = [torch.full((1 << 20,), float(number)) for number in range(50)]
    sums = []
    for batch in DistributedDataset([each.pin_memory() if pinned else each for each in rows], [gpu]):
        (moved,) = batch
        assert moved.device == physical.torch_device
        torch.cuda._sleep(1_000_000)  # the step still runs when its batch is dropped and the next one is copied
        sums.append(moved.sum())
        del batch, moved
    assert [total.item() for total in sums] == [float(number << 20) for number in range(50)]
