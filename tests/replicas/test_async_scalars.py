"""AsyncScalars: numbers of a CPU are there at once; those of a GPU when its events have passed, and no wait before."""

from __future__ import annotations

import torch
from tests.stand_in import stand_in_gpus

from lockstep.config import LogicalDevice
from lockstep.replicas.device.async_scalars import AsyncScalars
from lockstep.replicas.device.host_syncs import HostSyncs

VALUES = [0.1, torch.tensor(0.1), 3, torch.tensor([2**24 + 1]), torch.tensor(True)]
READ = (0.1, float(torch.tensor(0.1)), 3.0, float(2**24 + 1), 1.0)


def test_a_cpus_numbers_are_read_at_once(split_cpu: object):
    device: LogicalDevice = split_cpu(1)[0]  # type: ignore[operator]
    for where in (device, None):
        numbers = AsyncScalars(VALUES, where)
        assert numbers.arrived
        assert numbers.read() == READ


def test_a_gpus_numbers_come_in_one_copy_and_are_waited_for_when_read():
    with stand_in_gpus() as (devices, driver):
        driver.lags = True
        with HostSyncs() as reads:
            numbers, known = AsyncScalars(VALUES, devices[0]), AsyncScalars([1, 2.0], devices[0])
            assert not numbers.arrived
            assert known.arrived
            assert driver.waits == 0
            assert numbers.read() == READ
            assert numbers.read() == READ

        assert driver.waits == 1
        assert len(driver.calls("to_host")) == 1
        assert reads.syncs == []

        early = AsyncScalars(VALUES, devices[0])
        driver.catch_up()
        assert early.arrived
        assert early.read() == READ
        assert driver.waits == 1
