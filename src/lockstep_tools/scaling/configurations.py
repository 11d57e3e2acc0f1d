"""Which configurations a scaling run measures, and what hardware each has. Pure functions on numbers and devices.

One device is one logical device: one share of the cores, as one GPU is one of several. All cores as one device is a
row of its own, so that nobody takes the one for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.checks import check_least
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """How a recipe is measured.

    Args:
        batch_size: the global batch of one device.
        replicas: how many replicas to measure beside one device; 1 among them means that device.
        steps: timed steps of a configuration; an epoch that has no more is timed whole.
        warm_up: steps before the timed ones, at least 1.
        rounds: how often every configuration is measured, in turn with the others.
    """

    batch_size: int
    replicas: tuple[int, ...]
    steps: int = 24
    warm_up: int = 3
    rounds: int = 3

    def __post_init__(self) -> None:
        check_least(self, 1, "batch_size", "steps", "warm_up", "rounds")
        if not self.replicas or min(self.replicas) < 1:
            raise ConfigError(f"replicas={list(self.replicas)} was given, expected numbers of at least 1, such as 2,4")
        most = max(self.replicas)
        if self.batch_size < most:
            shortage = f"a total batch of {self.batch_size} leaves some of {most} replicas without an example"
            raise ConfigError(f"{shortage}; raise --batch-size to at least {most}, or lower --replicas")


def usual_replicas(devices: int) -> tuple[int, ...]:
    """The default numbers of replicas: 2, 4, 8 ... and all, so (2, 4, 6) for six devices."""
    return (*(2**power for power in range(1, devices.bit_length()) if 2**power < devices), devices)


def parse_replicas(text: str) -> tuple[int, ...]:
    """Reads ``1,2,4``; raises ConfigError where something in it is no number."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ConfigError(f"--replicas {text!r} cannot be read; write numbers with commas between, as 2,4") from None


Layout = Literal["one device", "whole machine", "same total", "N times the total"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of the tables."""

    layout: Layout
    replicas: int
    batch_size: int  # rows of a global batch
    cores: int | None  # intra-op threads of the process, which its replicas divide; None leaves torch's number
    hardware: float  # its hardware in units of one device's: cores over cores, or GPUs
    resource: str  # the hardware in words: "1 core", "2 GPUs"

    @property
    def name(self) -> str:
        """What the configuration is called in tables and plots."""
        if self.layout == "one device":
            return "1 device"
        if self.layout == "whole machine":
            return f"1 device, {self.resource}"
        total = "same" if self.layout == "same total" else f"{self.replicas} times the"
        return f"{self.replicas} replicas, {total} total"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What there is to divide: the logical devices, in replica order, and the CPU cores that this process may use."""

    devices: tuple[LogicalDevice, ...]
    cores: int

    def __post_init__(self) -> None:
        if len({device.kind for device in self.devices}) > 1:
            names = ", ".join(device.name for device in self.devices)
            raise ConfigError(f"--devices gives {names}; CPU and GPU do not scale together: choose one kind")
        if len(self.devices) < 2:
            raise ConfigError(
                f"--devices gives {len(self.devices)} logical device, expected at least 2; divide it: cpu:2"
            )

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].kind == "CPU"

    @property
    def share(self) -> int:
        """Cores of one logical device of the CPU: an equal part, and at least one."""
        return max(1, self.cores // len(self.devices))

    def amount(self, replicas: int) -> int:
        """Cores, or physical GPUs, that so many replicas run on."""
        if self.on_cpu:
            return min(self.cores, self.share * replicas)
        return len({device.physical.name for device in self.devices[:replicas]})


def plan(settings: ScalingSettings, hardware: Hardware) -> tuple[Configuration, ...]:
    """The configurations in the order of the table: one device, all cores, then each number of replicas both ways.

    Raises:
        ConfigError: more replicas than devices.
    """
    most, devices = max(settings.replicas), len(hardware.devices)
    if most > devices:
        raise ConfigError(
            f"{most} replicas were asked for, but --devices gives {devices} logical devices; choose at most {devices}"
        )
    several = sorted({replicas for replicas in settings.replicas if replicas > 1})
    if not several:
        raise ConfigError("--replicas names only 1, expected a number above 1 to compare with it; add one, such as 2")

    def row(layout: Layout, replicas: int, batch: int) -> Configuration:
        amount = hardware.cores if layout == "whole machine" else hardware.amount(replicas)
        unit = "core" if hardware.on_cpu else "GPU"
        return Configuration(
            layout=layout,
            replicas=replicas,
            batch_size=batch,
            cores=amount if hardware.on_cpu else None,
            hardware=amount / hardware.amount(1),
            resource=f"1 {unit}" if amount == 1 else f"{amount} {unit}s",
        )

    batch = settings.batch_size
    rows = [row("one device", 1, batch)]
    # With one device that has all cores the row would be the reference again.
    if hardware.on_cpu and hardware.cores > hardware.share:
        rows.append(row("whole machine", 1, batch))
    for replicas in several:
        rows += [row("same total", replicas, batch), row("N times the total", replicas, batch * replicas)]
    return tuple(rows)
