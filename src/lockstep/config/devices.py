"""What a device is: physical devices, the logical devices cut from them, and how a share is configured.

Values only. Which devices there are and how they are divided is the registry's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.replicas.device.driver import DeviceDriver

DeviceKind = Literal["CPU", "GPU"]


@dataclass(frozen=True, kw_only=True)
class PhysicalDevice:
    """One CPU, all its cores, or one GPU.

    Args:
        name: ``"cpu:0"``, ``"gpu:0"``, ``"gpu:1"`` and so on.
        kind: ``"CPU"`` or ``"GPU"``.
        memory: all of its memory in MB; None for the CPU, whose shares have no limit.
        torch_device: where its tensors live.
        driver: of a GPU that is not torch.cuda's to drive; None is as its ``torch_device`` says.
    """

    name: str
    kind: DeviceKind
    memory: int | None
    torch_device: torch.device
    driver: DeviceDriver | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class LogicalDeviceConfiguration:
    """One share of a physical device.

    Args:
        memory_limit: MB of the GPU's memory; None, and only None, for a share of the CPU.

    Example:
        >>> import lockstep as ls
        >>> cpu = ls.config.list_physical_devices("CPU")[0]
        >>> ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
        >>> [device.name for device in ls.config.list_logical_devices("CPU")]
        ['cpu:0', 'cpu:1']
    """

    memory_limit: int | None = None

    def __post_init__(self) -> None:
        limit = self.memory_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigError(f"memory_limit={limit!r} is no amount of memory; give a whole number of MB, or None")


@dataclass(frozen=True, kw_only=True)
class LogicalDevice:
    """A named share of a physical device: what a replica runs on.

    Args:
        name: ``"cpu:0"``, ``"gpu:3"``: numbered over all physical devices of the kind.
        kind: ``"CPU"`` or ``"GPU"``.
        physical: the device it is a share of.
        memory_limit: MB, or None where there is no limit.
        torch_device: where its tensors live, the physical device's.
    """

    name: str
    kind: DeviceKind
    physical: PhysicalDevice
    memory_limit: int | None
    torch_device: torch.device


def discover_physical_devices() -> tuple[PhysicalDevice, ...]:
    """The CPU and the GPUs that torch can use in this process."""
    cpu = PhysicalDevice(name="cpu:0", kind="CPU", memory=None, torch_device=torch.device("cpu"))
    gpus = range(torch.cuda.device_count())
    return (cpu, *(_gpu(number) for number in gpus))


def parse_kind(kind: str) -> DeviceKind:
    """``"CPU"`` or ``"GPU"`` from any case.

    Raises:
        ConfigError: another kind.
    """
    name = kind.upper() if isinstance(kind, str) else kind
    if name == "CPU":
        return "CPU"
    if name == "GPU":
        return "GPU"
    raise ConfigError(f"unknown device kind {kind!r}; choose 'CPU' or 'GPU', or None for both")


def _gpu(number: int) -> PhysicalDevice:
    memory = torch.cuda.get_device_properties(number).total_memory // 2**20
    return PhysicalDevice(name=f"gpu:{number}", kind="GPU", memory=memory, torch_device=torch.device("cuda", number))
