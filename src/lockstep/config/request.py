"""What a user writes for devices: lists of devices in Python, and the notation of ``--devices``.

A device is written ``"cpu:1"``, ``"gpu:1"``, ``"cuda:1"``, ``"/gpu:1"`` (in any case; also TensorFlow's
``"/device:GPU:1"``), or is a ``torch.device`` or a logical device. The number is that of the logical device. It may be
left out if there is only one device of the kind.

The command line's notation also divides devices:

cpu, gpu            all logical devices of that kind
cpu:4               divides the CPU in four shares and takes them (a lone CPU number counts shares; cpu:1 is all of it)
gpu:4x2048          divides GPU 0 in four shares of 2048 MB and takes them
gpu:0               takes GPU 0 (a lone GPU number is a name); so does cpu:0 the CPU
gpu:0,gpu:2         takes the devices with these names; with a comma every number is a name: cpu:0,cpu:1
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.checks import check_kind
from lockstep.config.devices import DeviceKind, DeviceRegistry, LogicalDevice, LogicalDeviceConfiguration, parse_kind
from lockstep.errors import ConfigError

DeviceName = str | torch.device | LogicalDevice

_NAME = re.compile(r"/?(?:device:)?(cpu|gpu|cuda)(?::(\d+))?", re.IGNORECASE)
_ITEM = re.compile(r"(cpu|gpu|cuda)(?::(\d+)(?:x(\d+))?)?", re.IGNORECASE)
_FORMS = "write cpu, gpu, cpu:4 (four shares), gpu:4x2048 (four shares of 2048 MB) or names such as gpu:0,gpu:2"

_MAX_SHARES = 1024  # every share is a thread: a mistyped number should end in one line, not in a machine out of memory


def resolve(registry: DeviceRegistry, devices: Sequence[DeviceName] | None) -> tuple[LogicalDevice, ...]:
    """The logical devices that ``devices`` means, in that order; see ``config.resolve_devices``."""
    if devices is None:
        return registry.default_devices()
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ConfigError(f"devices={devices!r} is not a list; write a list of devices such as ['cpu:0', 'cpu:1']")
    if not devices:
        raise ConfigError("devices is an empty list; name at least one device, or leave it out to take all")
    logical = registry.logical_devices()
    resolved = tuple(_find(logical, device) for device in devices)
    for number, device in enumerate(resolved):
        if device in resolved[:number]:
            written = ", ".join(_spelling(item) for item in devices)
            raise ConfigError(f"{device.name} is named twice in [{written}]; name each device once per strategy")
    return resolved


def _find(logical: tuple[LogicalDevice, ...], device: DeviceName) -> LogicalDevice:
    if isinstance(device, LogicalDevice):
        if device not in logical:
            raise _unknown(logical, device)
        return device
    # str(torch.device("cuda", 1)) is "cuda:1", so one pattern reads names and torch's devices.
    match = _NAME.fullmatch(str(device)) if isinstance(device, (str, torch.device)) else None
    if match is None:
        raise _unknown(logical, device)
    kind = "CPU" if match[1].lower() == "cpu" else "GPU"
    candidates = [candidate for candidate in logical if candidate.kind == kind]
    if match[2] is None and len(candidates) > 1:
        names = ", ".join(candidate.name for candidate in candidates)
        raise ConfigError(f"device {_spelling(device)} has no number, and there are {names}; name one of them")
    index = int(match[2] or 0)
    if index >= len(candidates):
        raise _unknown(logical, device)
    return candidates[index]


def _unknown(logical: tuple[LogicalDevice, ...], device: DeviceName) -> ConfigError:
    names = ", ".join(candidate.name for candidate in logical)
    return ConfigError(
        f"unknown device {_spelling(device)}; known: {names}; choose among them, "
        "or divide a device first with lockstep.config.set_logical_device_configuration"
    )


def _spelling(device: DeviceName) -> str:
    return device.name if isinstance(device, LogicalDevice) else repr(str(device))


class DeviceArgumentError(ConfigError, argparse.ArgumentTypeError):
    """A text for devices cannot be used. argparse shows the message of this one, and no other ValueError's."""


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """Which devices to divide (name -> shares), and then which to take: the named ones, or all of ``kind``."""

    splits: Mapping[str, tuple[LogicalDeviceConfiguration, ...]] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    kind: DeviceKind | None = None


def parse_device_request(text: str) -> DeviceRequest:
    """Reads the command line's notation for devices, such as ``cpu:4``; raises ConfigError for another form. Pure."""
    check_kind("devices", text, str, 'a text, such as "cpu:4"', optional=False)
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1:
        return DeviceRequest(devices=tuple(_parse_name(text, item) for item in items))
    kind, number, limit = _parse_item(text, items[0])
    if number is None:
        return DeviceRequest(kind=kind)
    # A lone CPU number counts shares, since a machine has one CPU; a lone GPU number is a name, since it may have
    # several GPUs.
    if limit is None and (kind == "GPU" or number == 0):
        return DeviceRequest(devices=(f"{kind.lower()}:{number}",))
    if kind == "CPU" and limit is not None:
        raise ConfigError(f"devices {text!r} gives the CPU's shares a memory limit; they have none: write cpu:{number}")
    if not 1 <= number <= _MAX_SHARES:
        raise ConfigError(f"devices {text!r} asks for {number} shares; ask for 1 to {_MAX_SHARES}")
    shares = (LogicalDeviceConfiguration(memory_limit=limit),) * number
    names = tuple(f"{kind.lower()}:{share}" for share in range(number))
    return DeviceRequest(splits={f"{kind.lower()}:0": shares}, devices=names)


def apply_request(registry: DeviceRegistry, request: DeviceRequest) -> tuple[LogicalDevice, ...]:
    """Divides the devices of ``registry`` as asked, and returns the logical devices to take."""
    for name, shares in request.splits.items():
        physical = {device.name: device for device in registry.physical_devices()}
        if name not in physical:
            raise ConfigError(f"{name} cannot be divided: this machine has {', '.join(physical)}; divide one of those")
        registry.configure(physical[name], shares)
    if request.devices is not None:
        return resolve(registry, request.devices)
    devices = registry.logical_devices(request.kind)
    if not devices:
        raise ConfigError(f"this machine has no {request.kind}; choose cpu, or cpu:4 to divide the CPU in four")
    return devices


def _parse_name(text: str, item: str) -> str:
    kind, number, limit = _parse_item(text, item)
    if number is None or limit is not None:
        raise ConfigError(f"devices {text!r}: a list has names of devices, but {item!r} is none; {_FORMS}")
    return f"{kind.lower()}:{number}"


def _parse_item(text: str, item: str) -> tuple[DeviceKind, int | None, int | None]:
    """The kind, the number and the memory limit of an item."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigError(f"devices {text!r} cannot be read at {item!r}; {_FORMS}")
    number, limit = (None if digits is None else int(digits) for digits in (match[2], match[3]))
    return parse_kind("cpu" if match[1].lower() == "cpu" else "gpu"), number, limit
