"""Physical and logical devices, under the names of ``tf.config``.

    physical devices --set_logical_device_configuration--> logical devices --resolve_devices--> a strategy's replicas

This module has the public functions and the one registry of the process. ``devices`` has the devices and the rules for
dividing them; ``request`` reads what a user writes for devices. Devices are looked for at the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep import tensorflow_names
from lockstep.config.devices import (
    DeviceRegistry,
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    parse_kind,
)
from lockstep.config.request import (
    DeviceArgumentError,
    DeviceName,
    DeviceRequest,
    apply_request,
    parse_device_request,
    resolve,
)
from lockstep.errors import ConfigError

__all__ = [
    "DeviceRegistry", "DeviceRequest", "LogicalDevice", "LogicalDeviceConfiguration", "PhysicalDevice",
    "default_devices", "get_logical_device_configuration", "list_logical_devices", "list_physical_devices",
    "parse_device_request", "release_devices", "request_devices", "resolve_devices", "set_logical_device_configuration",
]  # fmt: skip

# A machine's devices exist once per process, and so does their division.
_registry = DeviceRegistry()


def list_physical_devices(kind: str | None = None) -> list[PhysicalDevice]:
    """The machine's CPU and GPUs; ``kind`` "CPU" or "GPU", in any case, lists only those."""
    return list(_registry.physical_devices(None if kind is None else parse_kind(kind)))


def list_logical_devices(kind: str | None = None) -> list[LogicalDevice]:
    """The logical devices as divided now; ``kind`` "CPU" or "GPU", in any case, lists only those."""
    return list(_registry.logical_devices(None if kind is None else parse_kind(kind)))


def default_devices() -> tuple[LogicalDevice, ...]:
    """Every logical GPU, else every logical CPU device: what is used where no device is named.

    Warns once if torch has an accelerator that is no CUDA GPU, which then computes nothing.
    """
    return _registry.default_devices()


def set_logical_device_configuration(
    physical: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Divides a physical device into logical devices.

    Args:
        physical: a device from ``list_physical_devices()``.
        logical_devices: one item per share. A GPU's share needs a ``memory_limit``, a CPU's must have none.

    Raises:
        ConfigError: a ValueError: no such device, or shares that it cannot give.
        UsageError: a RuntimeError: another division than now, while a strategy that is not closed uses the device.
    """
    _registry.configure(physical, logical_devices)


def get_logical_device_configuration(physical: PhysicalDevice) -> list[LogicalDeviceConfiguration] | None:
    """The shares that ``physical`` was divided into; None if it was not divided."""
    shares = _registry.configuration(physical)
    return None if shares is None else list(shares)


def resolve_devices(devices: Sequence[DeviceName] | None) -> tuple[LogicalDevice, ...]:
    """The logical devices that ``devices`` means, in that order. They count as in use until ``release_devices``.

    Args:
        devices: names, torch devices or logical devices; None means every logical GPU, else every logical CPU device.

    Raises:
        ConfigError: an unknown device (the error lists the known ones), one named twice, or no list of devices.
    """
    resolved = resolve(_registry, devices)
    _registry.mark_in_use(resolved)
    return resolved


def release_devices(devices: Sequence[LogicalDevice]) -> None:
    """Says that one of those who resolved ``devices`` uses them no more. Without users they may be divided again."""
    _registry.release(devices)


def request_devices(text: str) -> tuple[LogicalDevice, ...]:
    """Divides devices as a program's user asks, and returns the logical devices to make a strategy of.

    Args:
        text: what is said on a command line: ``"gpu"`` or ``"cpu"`` for all of them; ``"cpu:4"`` for the CPU divided by
            four; ``"gpu:4x2048"`` for four shares of 2048 MB of the first GPU; or names, ``"gpu:0,gpu:2"``.

    Raises:
        ConfigError: another form, or an unknown device.
        UsageError: a device that is in use and divided in another way.

    Example:
        >>> import argparse, lockstep as ls
        >>> parser = argparse.ArgumentParser()
        >>> flag = parser.add_argument("--devices", type=ls.config.request_devices)  # a wrong one ends in one line
        >>> [device.name for device in parser.parse_args(["--devices", "cpu:0"]).devices]
        ['cpu:0']
    """
    try:
        return apply_request(_registry, parse_device_request(text))
    except ConfigError as error:
        # argparse shows the message of an ArgumentTypeError and hides that of any other ValueError.
        raise DeviceArgumentError(*error.args) from None


if not TYPE_CHECKING:  # which takes a module that has this for one that has every name

    def __getattr__(name: str) -> object:
        raise tensorflow_names.missing(f"module {__name__!r}", name, tensorflow_names.CONFIG)
