"""``lockstep devices``, and the devices and the strategy of every command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from lockstep import config
from lockstep.cli.flags import DevicesFlag, command
from lockstep.cluster.environment import cluster_from_environment
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.replicas.device.driver import gpu_driver
from lockstep.replicas.device.memory import MB
from lockstep.replicas.device.streams import device_memory_of
from lockstep.report import text_table
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy, own_devices

_LOGICAL = ("logical", "of", "share")


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep devices``."""
    app.command("devices", epilog="Example: lockstep devices --devices cpu:4")(command(Devices))


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Show the physical devices, and the logical devices that --devices makes of them.

    Args:
        devices: how to divide the devices.
    """

    devices: DevicesFlag = None

    def __call__(self) -> int:
        """Prints the tables."""
        chosen = take_devices(self.devices)
        print(f"{physical_table(config.list_physical_devices())}\n\n{memory_table(chosen)}")
        return 0


def take_devices(spec: str | None) -> tuple[config.LogicalDevice, ...]:
    """The logical devices for the value of ``--devices``, divided as it says; None means a strategy's default."""
    if spec is None:
        return config.resolve_devices(None)
    return config.apply_device_request(config.parse_device_request(spec))


def physical_table(physical: Sequence[config.PhysicalDevice]) -> str:
    """A row for each physical device: its name, product and size, and for GPUs the memory taken by all programs."""
    drivers = [gpu_driver(device) for device in physical]
    headings, rows = ["physical", "is", "has"], []
    for device, driver in zip(physical, drivers, strict=True):
        cores = len(os.sched_getaffinity(0))
        row = [
            device.name,
            "CPU" if driver is None else driver.product(device.torch_device),
            f"{cores} core{'s' * (cores > 1)}" if device.memory is None else f"{device.memory} MB",
        ]
        if driver is not None:
            free, total = driver.free_and_total(device.torch_device)
            row.append(_mb(total - free))
        elif any(drivers):
            row.append("-")
        rows.append(row)
    return text_table([*headings, "taken"] if any(drivers) else headings, rows)


def logical_table(logical: Sequence[config.LogicalDevice]) -> str:
    """A row for each logical device: its name, its physical device, and its share of it."""
    return text_table(_LOGICAL, [_logical_row(device) for device in logical])


def memory_table(logical: Sequence[config.LogicalDevice]) -> str:
    """``logical_table``, with this process's memory on GPUs: of tensors now, and at the peak."""
    memories = [device_memory_of(device) for device in logical]
    if not any(memories):
        return logical_table(logical)
    rows = [
        [*_logical_row(device), *(["-", "-"] if memory is None else [_mb(memory.in_use), _mb(memory.peak)])]
        for device, memory in zip(logical, memories, strict=True)
    ]
    return text_table([*_LOGICAL, "in use", "peak"], rows)


def _logical_row(device: config.LogicalDevice) -> list[str]:
    if device.memory_limit is not None:
        share = f"{device.memory_limit} MB"
    else:
        shares = len(config.get_logical_device_configuration(device.physical) or [device])
        share = "all of it" if shares == 1 else f"1 of {shares}"
    return [device.name, device.physical.name, share]


def _mb(size: int) -> str:
    return f"{size / MB:.0f} MB"


def take_own_devices(spec: str | None) -> tuple[LogicalDevice, ...]:
    """Like ``take_devices``, but None means this worker's own devices among the workers of its host."""
    return take_devices(spec) if spec is not None else resolve_devices(own_devices(cluster_from_environment()))


def make_strategy(devices: Sequence[LogicalDevice], seed: int) -> Strategy:
    """Makes the strategy for this process, or for the job of several workers that the environment declares."""
    cluster = cluster_from_environment()
    if cluster is None or cluster.num_workers == 1:
        return MirroredStrategy(devices, seed=seed)
    return MultiWorkerMirroredStrategy(devices, cluster=cluster, seed=seed)


def is_chief() -> bool:
    """Whether this process prints: it is the chief, or the only one."""
    cluster = cluster_from_environment()
    return cluster is None or cluster.is_chief


def declared_workers() -> int | None:
    """The number of workers that the environment declares; None if it declares none, so a command may start its own."""
    cluster = cluster_from_environment()
    return None if cluster is None else cluster.num_workers
