"""Physical devices, the logical devices that they are divided into, and the registry with the rules of dividing.

The registry takes its physical devices as an argument or looks for them when it is first asked. So its rules for GPUs
are tested on machines without one.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from lockstep.checks import shown
from lockstep.errors import ConfigError, UsageError

DeviceKind = Literal["CPU", "GPU"]


@dataclass(frozen=True, kw_only=True)
class PhysicalDevice:
    """The CPU with all its cores, or one GPU.

    Args:
        name: ``"cpu:0"``, ``"gpu:0"``, ``"gpu:1"`` and so on.
        kind: ``"CPU"`` or ``"GPU"``.
        memory: its memory in MB; None for the CPU, whose shares have no limit.
        torch_device: where its tensors are.
        driver: a ``DeviceDriver`` (``replicas/device``) for a GPU that torch.cuda does not drive; None chooses by
            ``torch_device``.
    """

    name: str
    kind: DeviceKind
    memory: int | None
    torch_device: torch.device
    driver: object | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class LogicalDeviceConfiguration:
    """One share of a physical device.

    Args:
        memory_limit: MB of the GPU's memory; must be None for a share of the CPU.

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
            raise ConfigError(
                f"memory_limit={shown(limit)} is not an amount of memory; give a whole number of MB, or None"
            )


@dataclass(frozen=True, kw_only=True)
class LogicalDevice:
    """A named share of a physical device; each replica runs on one.

    Args:
        name: ``"cpu:0"``, ``"gpu:3"``: the numbers run over all physical devices of the kind.
        kind: ``"CPU"`` or ``"GPU"``.
        physical: the device that it is a share of.
        memory_limit: MB; None for no limit.
        torch_device: where its tensors are: that of the physical device.
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


def unused_accelerator() -> str:
    """The type of the accelerator that torch has and Lockstep does not use, such as "mps" or "xpu"; empty if none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "cuda":
        return ""
    try:
        return accelerator.type if torch.accelerator.is_available() else ""
    except RuntimeError:  # a backend of another package that has registered its name and not its module (torch 2.13)
        return ""


def parse_kind(kind: str) -> DeviceKind:
    """``"CPU"`` or ``"GPU"``, from any case; raises ConfigError for another kind."""
    kinds: dict[str, DeviceKind] = {"CPU": "CPU", "GPU": "GPU"}
    if isinstance(kind, str) and kind.upper() in kinds:
        return kinds[kind.upper()]
    raise ConfigError(f"unknown device kind {kind!r}; choose 'CPU' or 'GPU', or None for both")


def _gpu(number: int) -> PhysicalDevice:
    memory = torch.cuda.get_device_properties(number).total_memory // 2**20
    return PhysicalDevice(name=f"gpu:{number}", kind="GPU", memory=memory, torch_device=torch.device("cuda", number))


_WHOLE = (LogicalDeviceConfiguration(),)


class DeviceRegistry:
    """The physical devices, how each is divided, and which of them are in use. Thread-safe."""

    def __init__(self, physical_devices: Sequence[PhysicalDevice] | None = None) -> None:
        self._physical = None if physical_devices is None else tuple(physical_devices)
        self._configurations: dict[PhysicalDevice, tuple[LogicalDeviceConfiguration, ...]] = {}
        self._uses: Counter[PhysicalDevice] = Counter()  # by strategies that are not closed
        self._warned = False
        # Reentrant: the methods call each other, such as ``configure`` the one that lists devices.
        self._lock = threading.RLock()

    def physical_devices(self, kind: DeviceKind | None = None) -> tuple[PhysicalDevice, ...]:
        """All physical devices or those of one kind, in the order of their numbers."""
        with self._lock:
            # At the first question and not at import: ``get_device_properties`` initialises CUDA, after which a forked
            # process cannot use it.
            if self._physical is None:
                self._physical = discover_physical_devices()
            return tuple(device for device in self._physical if kind in (None, device.kind))

    def logical_devices(self, kind: DeviceKind | None = None) -> tuple[LogicalDevice, ...]:
        """All logical devices or those of one kind, numbered in the order of their physical devices."""
        with self._lock:
            kinds: tuple[DeviceKind, ...] = ("CPU", "GPU") if kind is None else (kind,)
            return tuple(device for device_kind in kinds for device in self._number(device_kind))

    def default_devices(self) -> tuple[LogicalDevice, ...]:
        """All logical GPUs, else those of the CPU; warns once if torch has an accelerator that is not used then."""
        if gpus := self.logical_devices("GPU"):
            return gpus
        self.warn_of_accelerator()
        return self.logical_devices("CPU")

    def warn_of_accelerator(self) -> None:
        """Warns, once in this process, that the CPU is used although torch has an accelerator that is no CUDA GPU."""
        with self._lock:
            accelerator = "" if self._warned else unused_accelerator()
            if not accelerator:
                return
            self._warned = True
        warnings.warn(
            f"torch has the accelerator {accelerator!r} here, and Lockstep computes on CUDA GPUs and on the CPU only: "
            "no device was named, so this computes on the CPU and moves modules there; to ask for the CPU, name it: "
            'MirroredStrategy(devices=["cpu:0"])',
            stacklevel=2,
        )

    def configuration(self, physical: PhysicalDevice) -> tuple[LogicalDeviceConfiguration, ...] | None:
        """The shares that ``physical`` was divided into; None if it was not divided."""
        with self._lock:
            self._check_known(physical)
            return self._configurations.get(physical)

    def configure(self, physical: PhysicalDevice, shares: Iterable[LogicalDeviceConfiguration]) -> None:
        """Divides a device, as ``set_logical_device_configuration`` says. Its current division is always accepted."""
        with self._lock:
            self._check_known(physical)
            new = check_shares(physical, shares)
            old = self._configurations.get(physical, _WHOLE)
            # The same division again changes nothing, so it is accepted while strategies use the device.
            if new != old:
                self._check_free(physical, renumbers=len(new) != len(old))
            self._configurations[physical] = new

    def mark_in_use(self, devices: Iterable[LogicalDevice]) -> None:
        """Fixes the division of the physical devices of ``devices`` until ``release`` is called with the same."""
        with self._lock:
            self._uses.update({device.physical for device in devices})

    def release(self, devices: Iterable[LogicalDevice]) -> None:
        """Ends a use of the physical devices of ``devices``."""
        with self._lock:
            # ``-=`` on a Counter drops counts that reach zero, so ``in`` says whether a device is in use.
            self._uses -= Counter({device.physical for device in devices})

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
            names = ", ".join(device.name for device in self.physical_devices())
            raise ConfigError(
                f"received {got}, expected a physical device of this machine ({names}); "
                "take one from lockstep.config.list_physical_devices()"
            )

    def _check_free(self, physical: PhysicalDevice, *, renumbers: bool) -> None:
        devices = self.physical_devices(physical.kind)
        # Numbers run over all devices of a kind: one share more on gpu:0 renames those of every later GPU.
        affected = devices[devices.index(physical) :] if renumbers else (physical,)
        names = [device.name for device in affected if device in self._uses]
        if names:
            raise UsageError(
                f"{physical.name} cannot be divided again: {names[0]} is in use by a strategy and would change; "
                "divide devices before the first strategy or model is made, or after strategy.close() of each strategy "
                "that uses them, which is model.strategy.close() for a model"
            )


def check_shares(
    physical: PhysicalDevice, shares: Iterable[LogicalDeviceConfiguration]
) -> tuple[LogicalDeviceConfiguration, ...]:
    """The shares as a tuple. Raises ConfigError if there are none, or the device cannot have or give their limits."""
    checked = tuple(shares) if isinstance(shares, Iterable) else ()
    if not checked or not all(isinstance(share, LogicalDeviceConfiguration) for share in checked):
        raise ConfigError(f"{physical.name} was given the shares {shares!r}; give a list of LogicalDeviceConfiguration")
    limits = [share.memory_limit for share in checked if share.memory_limit is not None]
    if physical.kind == "CPU" and limits:
        raise ConfigError(
            f"a share of {physical.name} was given memory_limit={limits[0]}; a CPU's shares have none: "
            "write LogicalDeviceConfiguration()"
        )
    if physical.kind == "GPU" and len(limits) < len(checked):
        raise ConfigError(
            f"a share of {physical.name} was given no memory_limit; a GPU's shares need one: "
            "write LogicalDeviceConfiguration(memory_limit=2048)"
        )
    if physical.memory is not None and sum(limits) > physical.memory:
        total = " + ".join(str(limit) for limit in limits) if len(limits) <= 8 else f"{len(limits)} shares"
        raise ConfigError(
            f"the shares of {physical.name} add up to {total} = {sum(limits)} MB, but it has {physical.memory} MB; "
            f"with {len(limits)} equal shares give each at most {physical.memory // len(limits)} MB"
        )
    return checked
