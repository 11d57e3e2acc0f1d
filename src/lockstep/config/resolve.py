"""From what a user writes for a device to the logical device it means.

A device is written ``"cpu:1"``, ``"gpu:1"``, ``"cuda:1"``, ``"/gpu:1"`` (in any case; TensorFlow's ``"/device:GPU:1"``
too), a ``torch.device``, or a logical device. The number is always that of the logical device. Without a number it is
the kind's only device; where there are several the number must be given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from lockstep.config.devices import DeviceKind, LogicalDevice
from lockstep.config.registry import DeviceRegistry
from lockstep.errors import ConfigError

DeviceName = str | torch.device | LogicalDevice

_WRITTEN = re.compile(r"/?(?:device:)?(cpu|gpu|cuda)(?::(\d+))?", re.IGNORECASE)


def resolve(registry: DeviceRegistry, devices: Sequence[DeviceName] | None) -> tuple[LogicalDevice, ...]:
    """The logical devices that ``devices`` means, in that order; None means every GPU, else every CPU device.

    Raises:
        ConfigError: no list, an empty one, an unknown device, or one device twice.
    """
    if devices is None:
        return registry.logical_devices("GPU") or registry.logical_devices("CPU")
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ConfigError(f"devices={devices!r} is not a list; write a list of devices such as ['cpu:0', 'cpu:1']")
    if not devices:
        raise ConfigError("devices is an empty list; name at least one device, or leave it out to take all")
    known = registry.logical_devices()
    found = tuple(_find(known, device) for device in devices)
    for number, device in enumerate(found):
        if device in found[:number]:
            written = ", ".join(_shown(item) for item in devices)
            raise ConfigError(f"{device.name} is named twice in [{written}]; name each device once per strategy")
    return found


def _find(known: tuple[LogicalDevice, ...], device: DeviceName) -> LogicalDevice:
    if isinstance(device, LogicalDevice):
        if device not in known:
            raise _unknown(known, device)
        return device
    kind, number = _read(known, device)
    candidates = [logical for logical in known if logical.kind == kind]
    if number is None and len(candidates) > 1:
        names = ", ".join(logical.name for logical in candidates)
        raise ConfigError(f"device {_shown(device)} has no number, and there are {names}; name one of them")
    index = number or 0
    if index >= len(candidates):
        raise _unknown(known, device)
    return candidates[index]


def _read(known: tuple[LogicalDevice, ...], device: DeviceName) -> tuple[DeviceKind, int | None]:
    match = _WRITTEN.fullmatch(str(device)) if isinstance(device, (str, torch.device)) else None
    if match is None:
        raise _unknown(known, device)
    kind: DeviceKind = "CPU" if match[1].lower() == "cpu" else "GPU"
    return kind, None if match[2] is None else int(match[2])


def _unknown(known: tuple[LogicalDevice, ...], device: DeviceName) -> ConfigError:
    names = ", ".join(logical.name for logical in known)
    return ConfigError(
        f"unknown device {_shown(device)}; known: {names}; choose among them, "
        "or divide a device first with lockstep.config.set_logical_device_configuration"
    )


def _shown(device: DeviceName) -> str:
    return device.name if isinstance(device, LogicalDevice) else repr(str(device))
