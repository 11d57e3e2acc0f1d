"""What the engine asks of a GPU, and of nothing else: streams, events, memory, generators, copies to and from the host.

    the caller's stream --.            .-- share gpu:0's stream --.   meeting   .--> ...
                          '-- events --+-- share gpu:1's stream --+-- stream ---+--> ...
                                       '-- ...                  --'             '--> ...

One narrow object, so that order, waits and accounts can be tested without a GPU: ``tests/stand_in`` has another driver
that computes on the CPU and writes down what it was asked. ``replicas.cuda_driver`` is the one for CUDA.
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
"""What a physical device's streams beside those of its shares are for: work done once for all, input, recordings."""


class DeviceDriver(Protocol):
    """The calls. A ``LogicalDevice`` is a share, a ``torch.device`` the whole GPU; streams and events are opaque."""

    def stream(self, device: LogicalDevice) -> Any:
        """The share's own stream, the same one at every call; what is allocated on it is of the share's pool."""

    def side_stream(self, device: torch.device, purpose: Purpose) -> Any:
        """A stream of the physical device that is no share's, the same one at every call."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream that the calling thread queues on."""

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Inside the block the calling thread queues on ``stream``, and its device is the current one."""

    def record(self, stream: Any) -> Any:
        """An event behind everything that any thread has queued on ``stream`` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on ``stream`` from now on runs behind ``event``. The host does not wait."""

    def query(self, event: Any) -> bool:
        """Whether the device has come past ``event``. The host does not wait."""

    def synchronize(self, event: Any) -> None:
        """Waits, on the host, until the device has come past ``event``: the only call here that does."""

    def use_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the tensor's memory, once it is dropped, until what is then queued on ``stream`` has run."""

    def allocated(self, device: torch.device) -> int:
        """Bytes that tensors of this process take now, on the whole GPU."""

    def peak(self, device: torch.device) -> int:
        """The most that ``allocated`` has been since ``reset_peak``."""

    def reset_peak(self, device: torch.device) -> None:
        """Begins a new ``peak``."""

    def resizes(self, device: torch.device) -> int:
        """How often memory was taken from the GPU or given back to it: while it stays the same, so do all pools."""

    def pool(self, device: LogicalDevice) -> PoolUse:
        """What the share's pool has now. Looks at every block, a millisecond or more: not for every step."""

    def whole(self, device: torch.device) -> PoolUse:
        """What all of this process has on the GPU."""

    def product(self, device: torch.device) -> str:
        """What the GPU is called by who makes it."""

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """Bytes that no process has taken, and all bytes of the GPU."""

    def give_back(self, device: torch.device) -> None:
        """Gives back to the GPU what pools keep for later use and no tensor needs."""

    def limits_pools(self) -> bool:
        """Whether ``pool`` and ``resizes`` can be relied on."""

    def new_generator(self, device: torch.device, seed: int) -> torch.Generator:
        """A generator for ``lend``."""

    def lend(self, device: torch.device, own: torch.Generator) -> Any:
        """Makes the GPU's default generator draw ``own``'s numbers; gives what ``take_back`` needs."""

    def take_back(self, device: torch.device, own: torch.Generator, others: Any) -> None:
        """Ends ``lend``: ``own`` has gone on by what was drawn, and the default generator draws as before."""

    def graph_pool(self, device: torch.device) -> Any:
        """Memory for recordings of the device of which no two are ever replayed at a time."""

    def graph(self, device: torch.device, generators: Sequence[torch.Generator], pool: Any) -> DeviceGraph:
        """A recording to be made, in which ``generators`` are drawn from, and the GPU's default one."""

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy in pinned host memory, and the event at which it is complete; the host does not wait."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in pinned host memory: the tensor itself, if it is there already."""

    def to_device(self, tensor: torch.Tensor, device: LogicalDevice, stream: Any) -> torch.Tensor:
        """A copy on the device, queued on ``stream``, for the share's own stream to use behind an event of it."""


@dataclass(frozen=True)
class StreamEvent:
    """A place in the order of one stream: everything queued there so far, by any thread.

    Args:
        driver: of the device.
        device: whose stream it is.
        event: recorded there.
    """

    driver: DeviceDriver
    device: torch.device
    event: Any

    def wait(self) -> None:
        """What the calling thread queues from now on, on the mark's device, runs behind it."""
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
