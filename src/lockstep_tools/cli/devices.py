"""``lockstep devices``, and the devices and the strategy of every command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from lockstep import config
from lockstep.cluster.environment import cluster_from_environment
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.console import text_table
from lockstep.replicas.device.driver import gpu_driver
from lockstep.replicas.device.memory import MB
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy, worker_devices
from lockstep_tools.cli.flags import DevicesFlag, command


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
        logical = take_devices(self.devices)
        print(f"{physical_table(config.list_physical_devices())}\n\n{logical_table(logical)}")
        return 0


def take_devices(spec: str | None) -> tuple[config.LogicalDevice, ...]:
    """The logical devices for the value of ``--devices``, divided as it says; None means a strategy's default."""
    if spec is None:
        return config.resolve_devices(None)
    return config.request_devices(spec)


def physical_table(physical: Sequence[config.PhysicalDevice]) -> str:
    """A row for each physical device: its name, product and size, and for GPUs the memory taken by all programs."""
    rows = []
    for device in physical:
        driver = gpu_driver(device)
        if driver is None:
            # What this process may use, in a container or under taskset, and not ``os.cpu_count``, which counts the
            # machine's.
            cores = len(os.sched_getaffinity(0))
            rows.append([device.name, "CPU", f"{cores} core{'s' * (cores > 1)}", "-"])
        else:
            free, total = driver.free_and_total(device.torch_device)
            used_memory = f"{(total - free) / MB:.0f} MB"
            rows.append([device.name, driver.product(device.torch_device), f"{device.memory} MB", used_memory])
    return text_table(["physical", "is", "has", "taken"], rows)


def logical_table(logical: Sequence[config.LogicalDevice]) -> str:
    """A row for each logical device: its name, its physical device, and its share of it."""
    return text_table(("logical", "of", "share"), [_logical_row(device) for device in logical])


def _logical_row(device: config.LogicalDevice) -> list[str]:
    if device.memory_limit is not None:
        share = f"{device.memory_limit} MB"
    else:
        shares = len(config.get_logical_device_configuration(device.physical) or [device])
        share = "all of it" if shares == 1 else f"1 of {shares}"
    return [device.name, device.physical.name, share]


def take_own_devices(spec: str | None) -> tuple[LogicalDevice, ...]:
    """Like ``take_devices``, but None means this worker's own devices among the workers of its host."""
    return take_devices(spec) if spec is not None else resolve_devices(worker_devices(cluster_from_environment()))


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
