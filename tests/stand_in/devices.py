"""Logical devices of kind "GPU" on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tests.stand_in.driver import StandInDriver

from lockstep import config
from lockstep.config import DeviceRegistry, LogicalDevice, LogicalDeviceConfiguration, PhysicalDevice


@contextmanager
def stand_in_gpus(
    shares: Sequence[int] | None = (2048, 2048), *, memory_mb: int = 8192
) -> Iterator[tuple[tuple[LogicalDevice, ...], StandInDriver]]:
    """A machine with a CPU and one GPU that there is not. At the end it fails if an order was left to chance.

    Args:
        shares: the memory limits that the GPU is divided by, in MB; None leaves it whole.
        memory_mb: of the GPU.
    """
    driver = StandInDriver(memory_mb)
    cpu = PhysicalDevice(name="cpu:0", kind="CPU", memory=None, torch_device=torch.device("cpu"))
    gpu = PhysicalDevice(name="gpu:0", kind="GPU", memory=memory_mb, torch_device=torch.device("cpu"), driver=driver)
    registry = DeviceRegistry([cpu, gpu])
    if shares is not None:
        registry.configure(gpu, [LogicalDeviceConfiguration(memory_limit=limit) for limit in shares])
    before, config._registry = config._registry, registry
    try:
        with driver.following():
            yield registry.logical_devices("GPU"), driver
    finally:
        config._registry = before
    assert driver.faults == [], driver.faults[0]
