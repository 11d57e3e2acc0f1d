"""``lockstep devices``: the devices of this machine and how they are divided."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from lockstep import config
from lockstep.replicas.device.driver import gpu_driver
from lockstep.replicas.device.memory import MB, DeviceMemory
from lockstep.replicas.device.streams import device_memory_of
from lockstep.report import text_table

DEVICES_HELP = (
    "cpu:4 divides the CPU in four; gpu:4x2048 divides GPU 0 in four shares of 2048 MB; gpu:0,gpu:2 picks by name; "
    "cpu or gpu takes all of that kind. Without it: every GPU, or else the CPU."
)
LOGICAL = ("logical", "of", "share")
DevicesFlag = Annotated[str | None, typer.Option("--devices", metavar="SPEC", help=DEVICES_HELP, show_default=False)]


def devices(*, devices: DevicesFlag = None) -> Callable[[], int]:
    """Show the physical devices, and the logical devices that --devices makes of them."""

    def job() -> int:
        chosen = take_devices(devices)
        print(physical_table(config.list_physical_devices()))
        print()
        print(memory_table(chosen))
        return 0

    return job


def take_devices(spec: str | None) -> tuple[config.LogicalDevice, ...]:
    """The logical devices that a ``--devices`` flag means, divided as it asks; None means what a strategy takes.

    Raises:
        ConfigError: a form that is not there, or a device or a share that this machine cannot give.
    """
    if spec is None:
        return config.resolve_devices(None)
    return config.apply_device_request(config.parse_device_request(spec))


def physical_table(physical: Sequence[config.PhysicalDevice]) -> str:
    """One row for every physical device: its name, what it is, what it has to share, and of a GPU what is taken.

    That counts the memory of every program on the GPU, and what CUDA takes for itself.
    """
    headings, rows = ["physical", "is", "has"], [[p.name, _product(p), _whole(p)] for p in physical]
    if any(p.kind == "GPU" for p in physical):
        headings, rows = [*headings, "taken"], [[*row, _taken(p)] for row, p in zip(rows, physical, strict=True)]
    return text_table(headings, rows)


def logical_table(logical: Sequence[config.LogicalDevice]) -> str:
    """One row for every logical device: its name, what it is a share of, and how large the share is."""
    return text_table(LOGICAL, [_logical_row(device) for device in logical])


def memory_table(logical: Sequence[config.LogicalDevice]) -> str:
    """``logical_table``, and of GPUs and their shares what this process has there: of tensors now, and at the most."""
    memories = [device_memory_of(device) for device in logical]
    if not any(memories):
        return logical_table(logical)
    rows = [[*_logical_row(device), *_memory(memory)] for device, memory in zip(logical, memories, strict=True)]
    return text_table([*LOGICAL, "in use", "peak"], rows)


def _logical_row(device: config.LogicalDevice) -> list[str]:
    return [device.name, device.physical.name, _share(device)]


def _product(physical: config.PhysicalDevice) -> str:
    driver = gpu_driver(physical)
    return "CPU" if driver is None else driver.product(physical.torch_device)


def _whole(physical: config.PhysicalDevice) -> str:
    return _cores(len(os.sched_getaffinity(0))) if physical.memory is None else f"{physical.memory} MB"


def _taken(physical: config.PhysicalDevice) -> str:
    driver = gpu_driver(physical)
    if driver is None:
        return "-"
    free, total = driver.free_and_total(physical.torch_device)
    return _mb(total - free)


def _memory(memory: DeviceMemory | None) -> list[str]:
    return ["-", "-"] if memory is None else [_mb(memory.in_use), _mb(memory.peak)]


def _mb(size: int) -> str:
    return f"{size / MB:.0f} MB"


def _share(device: config.LogicalDevice) -> str:
    if device.memory_limit is not None:
        return f"{device.memory_limit} MB"
    shares = len(config.get_logical_device_configuration(device.physical) or [device])
    return "all of it" if shares == 1 else f"1 of {shares}"


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"
