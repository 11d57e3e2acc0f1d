"""Which devices there are and how each is divided: the rules of splitting, and when it is too late to split.

The registry is handed its physical devices, or looks for them when it is first asked; so its rules about GPUs hold,
and are tested, on machines without one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from lockstep.config.devices import (
    DeviceKind,
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    discover_physical_devices,
)
from lockstep.errors import ConfigError, UsageError

_WHOLE = (LogicalDeviceConfiguration(),)


class DeviceRegistry:
    """Physical devices, their division into logical ones, and which of them are in use. Safe to use from threads.

    Args:
        physical_devices: the devices to know; None looks for this machine's at the first question.
    """

    def __init__(self, physical_devices: Sequence[PhysicalDevice] | None = None) -> None:
        self._physical = None if physical_devices is None else tuple(physical_devices)
        self._configurations: dict[PhysicalDevice, tuple[LogicalDeviceConfiguration, ...]] = {}
        self._in_use: set[PhysicalDevice] = set()
        self._lock = threading.RLock()

    def physical_devices(self, kind: DeviceKind | None = None) -> tuple[PhysicalDevice, ...]:
        """All physical devices, or those of one kind, in the order of their numbers."""
        with self._lock:
            if self._physical is None:
                self._physical = discover_physical_devices()
            return tuple(device for device in self._physical if kind in (None, device.kind))

    def logical_devices(self, kind: DeviceKind | None = None) -> tuple[LogicalDevice, ...]:
        """All logical devices, or those of one kind; a kind's are numbered in the order of its physical devices."""
        with self._lock:
            kinds: tuple[DeviceKind, ...] = ("CPU", "GPU") if kind is None else (kind,)
            return tuple(device for each in kinds for device in self._number(each))

    def configuration(self, physical: PhysicalDevice) -> tuple[LogicalDeviceConfiguration, ...] | None:
        """The shares that ``physical`` was divided into, or None where it was not configured.

        Raises:
            ConfigError: no such device.
        """
        with self._lock:
            self._check_known(physical)
            return self._configurations.get(physical)

    def configure(self, physical: PhysicalDevice, shares: Iterable[LogicalDeviceConfiguration]) -> None:
        """Divides ``physical`` into ``shares``. The same division again is accepted at any time.

        Raises:
            ConfigError: no such device, no share, or limits that the device cannot give.
            UsageError: another division of a device that is in use.
        """
        with self._lock:
            self._check_known(physical)
            new = check_shares(physical, shares)
            old = self._configurations.get(physical, _WHOLE)
            if new != old:
                self._check_free(physical, renumbers=len(new) != len(old))
            self._configurations[physical] = new

    def mark_in_use(self, devices: Iterable[LogicalDevice]) -> None:
        """Notes that ``devices`` were handed out: their physical devices keep their division from now on."""
        with self._lock:
            self._in_use.update(device.physical for device in devices)

    def _number(self, kind: DeviceKind) -> list[LogicalDevice]:
        shares = [
            (physical, share)
            for physical in self.physical_devices(kind)
            for share in self._configurations.get(physical, _WHOLE)
        ]
        return [
            LogicalDevice(
                name=f"{kind.lower()}:{number}",
                kind=kind,
                physical=physical,
                memory_limit=share.memory_limit,
                torch_device=physical.torch_device,
            )
            for number, (physical, share) in enumerate(shares)
        ]

    def _check_known(self, physical: PhysicalDevice) -> None:
        if not isinstance(physical, PhysicalDevice) or physical not in self.physical_devices():
            got = physical.name if isinstance(physical, PhysicalDevice) else f"a {type(physical).__name__}"
            known = ", ".join(device.name for device in self.physical_devices())
            raise ConfigError(
                f"received {got}, expected a physical device of this machine ({known}); "
                "take one from lockstep.config.list_physical_devices()"
            )

    def _check_free(self, physical: PhysicalDevice, *, renumbers: bool) -> None:
        devices = self.physical_devices(physical.kind)
        affected = devices[devices.index(physical) :] if renumbers else (physical,)
        used = [device.name for device in affected if device in self._in_use]
        if used:
            raise UsageError(
                f"{physical.name} cannot be divided anew: {used[0]} is in use by a strategy and would change; "
                "configure devices before the first strategy is made"
            )


def check_shares(
    physical: PhysicalDevice, shares: Iterable[LogicalDeviceConfiguration]
) -> tuple[LogicalDeviceConfiguration, ...]:
    """The shares as a tuple, if ``physical`` can be divided so.

    Raises:
        ConfigError: no share, a share that is none, a limit missing on a GPU or given on a CPU, or limits that add up
            to more than the device has.
    """
    if not isinstance(shares, Iterable) or not (checked := tuple(shares)):
        raise ConfigError(f"{physical.name} was given no shares; give a list of LogicalDeviceConfiguration")
    for share in checked:
        if not isinstance(share, LogicalDeviceConfiguration):
            raise ConfigError(f"{physical.name} was given the share {share!r}; give LogicalDeviceConfiguration objects")
    if physical.kind == "CPU":
        _check_cpu_limits(physical, checked)
    else:
        _check_gpu_limits(physical, checked)
    return checked


def _check_cpu_limits(physical: PhysicalDevice, shares: Sequence[LogicalDeviceConfiguration]) -> None:
    for share in shares:
        if share.memory_limit is not None:
            raise ConfigError(
                f"a share of {physical.name} was given memory_limit={share.memory_limit}; a CPU's shares have none: "
                "write LogicalDeviceConfiguration()"
            )


def _check_gpu_limits(physical: PhysicalDevice, shares: Sequence[LogicalDeviceConfiguration]) -> None:
    limits = [share.memory_limit for share in shares if share.memory_limit is not None]
    if len(limits) < len(shares):
        raise ConfigError(
            f"a share of {physical.name} was given no memory_limit; a GPU's shares need one: "
            "write LogicalDeviceConfiguration(memory_limit=2048)"
        )
    if physical.memory is not None and sum(limits) > physical.memory:
        asked = " + ".join(str(limit) for limit in limits) if len(limits) <= 8 else f"{len(limits)} shares"
        raise ConfigError(
            f"the shares of {physical.name} add up to {asked} = {sum(limits)} MB, but it has {physical.memory} MB; "
            f"with {len(limits)} equal shares give each at most {physical.memory // len(limits)} MB"
        )
