"""The interface to a GPU: streams, events, memory, generators, graphs, and copies to and from the host.

    the caller's stream --.            .-- share gpu:0's stream --.   meeting   .--> ...
                          '-- events --+-- share gpu:1's stream --+-- stream ---+--> ...
                                       '-- ...                  --'             '--> ...

It is narrow so that order, waits and memory accounts can be tested without a GPU: ``tests/stand_in`` has a driver that
computes on the CPU and records its calls. ``device.cuda`` is the driver for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch

from lockstep.config import LogicalDevice, PhysicalDevice
from lockstep.replicas.device.cuda import CudaDriver, DeviceGraph
from lockstep.replicas.device.memory import PoolUse

Purpose = Literal["meeting", "copy", "recording"]
"""The purpose of a stream that is no logical device's: combining values, copying input, capturing graphs."""


class DeviceDriver(Protocol):
    """A ``LogicalDevice`` is a share of it, a ``torch.device`` all of it; streams and events are opaque."""

    def stream(self, device: LogicalDevice) -> Any:
        """The stream of a logical device, the same at every call; memory allocated on it is of the device's pool."""

    def side_stream(self, device: torch.device, purpose: Purpose) -> Any:
        """A stream of the physical device that is no logical device's, the same at every call."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream on which the calling thread queues work."""

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """A block in which the calling thread queues work on ``stream``, and its device is the current one."""

    def record(self, stream: Any) -> Any:
        """An event behind all work that any thread has queued on ``stream``."""

    def wait(self, stream: Any, event: Any) -> None:
        """Makes what is queued on ``stream`` from now on run behind ``event``. The host does not wait."""

    def query(self, event: Any) -> bool:
        """Whether the device has reached ``event``. The host does not wait."""

    def synchronize(self, event: Any) -> None:
        """Makes the host wait until the device has reached ``event``; no other call here waits."""

    def use_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps a dropped tensor's memory from reuse until the work then queued on ``stream`` has run."""

    def allocated(self, device: torch.device) -> int:
        """The bytes in tensors of this process on the whole GPU."""

    def peak(self, device: torch.device) -> int:
        """The maximum of ``allocated`` since ``reset_peak``."""

    def reset_peak(self, device: torch.device) -> None:
        """Starts a new ``peak``."""

    def resizes(self, device: torch.device) -> int:
        """How often memory was taken from the GPU or released; while unchanged, so are the sizes of all pools."""

    def pool(self, device: LogicalDevice) -> PoolUse:
        """The memory pool of a logical device. It inspects every block, in milliseconds: not for every step."""

    def whole(self, device: torch.device) -> PoolUse:
        """All memory of this process on the GPU."""

    def product(self, device: torch.device) -> str:
        """The product name of the GPU."""

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """The free bytes of the GPU, and all its bytes."""

    def release_cached(self, device: torch.device) -> None:
        """Releases cached memory that no tensor uses."""

    def limits_pools(self) -> bool:
        """Whether ``pool`` and ``resizes`` are reliable."""

    def new_generator(self, device: torch.device, seed: int) -> torch.Generator:
        """A generator for ``swap_generator``."""

    def swap_generator(self, device: torch.device, own: torch.Generator) -> Any:
        """Makes the GPU's default generator draw from ``own``; returns what ``restore_generator`` needs."""

    def restore_generator(self, device: torch.device, own: torch.Generator, others: Any) -> None:
        """Ends ``swap_generator``: ``own`` has advanced, and the default generator draws as before."""

    def graph_pool(self, device: torch.device) -> Any:
        """A memory pool for graphs of the device that are never replayed at the same time."""

    def graph(self, device: torch.device, generators: Sequence[torch.Generator], pool: Any) -> DeviceGraph:
        """A graph to capture, which draws from ``generators`` and the GPU's default generator."""

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy in pinned host memory, and the event behind it. The host does not wait."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned host memory; itself if it is there already."""

    def to_device(self, tensor: torch.Tensor, device: LogicalDevice, stream: Any) -> torch.Tensor:
        """A copy on the device, queued on ``stream``; the device's own stream must wait for an event of ``stream``."""


@dataclass(frozen=True)
class StreamEvent:
    """A point in the work of one stream.

    Args:
        driver: the driver of the device.
        device: the GPU of the stream.
        event: the driver's event.
    """

    driver: DeviceDriver
    device: torch.device
    event: Any

    def wait(self) -> None:
        """Makes what the calling thread queues on the event's device from now on run behind it."""
        self.driver.wait(self.driver.current_stream(self.device), self.event)


def driver_of(device: LogicalDevice) -> DeviceDriver | None:
    """The driver of a logical device; None on a CPU."""
    return gpu_driver(device.physical)


def gpu_driver(physical: PhysicalDevice) -> DeviceDriver | None:
    """The driver of a physical device; None for a CPU."""
    return None if physical.kind == "CPU" else physical.driver or _cuda()


@cache
def _cuda() -> CudaDriver:
    return CudaDriver()
