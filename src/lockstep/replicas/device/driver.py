"""The driver of GPUs: streams, events, memory, generators, CUDA graphs, and copies to and from the host.

    the caller's stream --.            .-- share gpu:0's stream --.   meeting   .--> ...
                          '-- events --+-- share gpu:1's stream --+-- stream ---+--> ...
                                       '-- ...                  --'             '--> ...

Only this module calls torch.cuda for these: ``tests/stand_in`` has a driver with the same methods that computes on the
CPU and records its calls. torch's allocator reuses a freed block only on the stream on which it was allocated, so a
share's stream is its memory pool as well. ``torch.cuda.MemPool`` is not used: in torch 2.11 a block that
``record_stream`` has seen is not reused while a pool is open, and cached memory is not released.

What is said of CUDA here was read in torch's documentation and sources; no GPU has shown it yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

from lockstep._torch_compat import clear_failed_graph
from lockstep.config import LogicalDevice, PhysicalDevice


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """The bytes of a pool in tensors, and all bytes that it has taken from the GPU, cached ones included."""

    in_use: int
    reserved: int


class DeviceGraph:
    """A CUDA graph of one device, captured on ``stream``.

    Its work draws from ``generators``, which advance with each replay. Graphs of one ``pool`` are never replayed at the
    same time.
    """

    def __init__(
        self, device: torch.device, generators: Sequence[torch.Generator], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self._device = device
        self._stream = stream
        self._generators = tuple(generators)
        self._pool = pool
        with torch.cuda.device(device):  # where older torch keeps the seeds and offsets of these generators
            self._graph = torch.cuda.CUDAGraph()
            for generator in self._generators:
                self._graph.register_generator_state(generator)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Captures a block's work, also on streams that fork and join. After an error all is meant to be as before."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # so that the capture can use what eager steps have cached
            self._stream.wait_stream(torch.cuda.current_stream())
            # Not torch.cuda.graph: if the end of a failed capture raises, it leaves its stream the current one.
            with torch.cuda.stream(self._stream), ExitStack() as failed:
                failed.callback(self._give_up)
                self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):  # the same failure again
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()  # never twice: torch counts the captures in progress
                failed.pop_all()

    def replay(self) -> None:
        """Runs the captured work on the current stream, without waiting for it."""
        self._graph.replay()

    def _give_up(self) -> None:
        """Restores the allocator and the generators after a capture that has failed."""
        clear_failed_graph(self._graph, self._device.index, self._pool)
        for generator in self._generators:  # one left in capture would refuse to draw
            generator.graphsafe_set_state(generator.clone_state())


class DeviceDriver:
    """A ``LogicalDevice`` is a share of a GPU, a ``torch.device`` all of it. Streams last as long as the process."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def stream(self, device: LogicalDevice) -> torch.cuda.Stream:
        """The stream of a logical device; memory allocated on it is of the device's pool."""
        return self.side_stream(device.torch_device, device.name)

    def side_stream(self, device: torch.device, purpose: str) -> torch.cuda.Stream:
        """A stream of the physical device for combining values, copying input or capturing graphs."""
        key = (device, purpose)
        with self._lock:
            if key not in self._streams:
                # torch hands out 32 streams a device in turn, and then the first one again.
                self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[key]

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """A block in which the calling thread queues work on ``stream``, and its device is the current one."""
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # torch's default event has no timing, which CUDA's reference advises for events that only order work.
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes what is queued on ``stream`` from now on run behind ``event``."""
        stream.wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        """Whether the device has reached ``event``."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Makes the host wait until the device has reached ``event``; no other method here waits."""
        event.synchronize()

    def use_on(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Keeps a dropped tensor's memory from reuse until the work then queued on ``stream`` has run."""
        tensor.record_stream(stream)

    def peak(self, device: torch.device) -> int:
        """The most bytes in tensors of this process on the whole GPU since ``reset_peak``."""
        return _statistic(device, "allocated_bytes", "peak")

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def resizes(self, device: torch.device) -> int:
        """How often memory was taken from the GPU or released; while unchanged, so are the sizes of all pools."""
        # Nested, since making the flat names of memory_stats() costs several times what reading the numbers does.
        statistics = torch.cuda.memory_stats_as_nested_dict(device)
        return int(statistics["num_device_alloc"]) + int(statistics["num_device_free"])

    def pool(self, device: LogicalDevice) -> PoolUse:
        """The memory pool of a logical device. It inspects every block, in milliseconds: not for every step."""
        stream = self.stream(device).cuda_stream
        index = device.torch_device.index
        segments = [
            segment
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == index and segment["stream"] == stream
        ]
        return PoolUse(
            in_use=sum(segment["allocated_size"] for segment in segments),
            reserved=sum(segment["total_size"] for segment in segments),
        )

    def whole(self, device: torch.device) -> PoolUse:
        return PoolUse(
            in_use=_statistic(device, "allocated_bytes", "current"),
            reserved=_statistic(device, "reserved_bytes", "current"),
        )

    def product(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return free, total

    def release_cached(self, device: torch.device) -> None:
        torch.cuda.empty_cache()  # of all GPUs: torch has no call for one

    def limits_pools(self) -> bool:
        # With cudaMallocAsync all streams allocate from one pool of the device, which is not divided into shares.
        return torch.cuda.get_allocator_backend() == "native"

    def new_generator(self, device: torch.device, seed: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    def swap_generator(self, device: torch.device, generator: torch.Generator) -> torch.Generator:
        """Makes the GPU's default generator draw from ``generator``; returns what ``restore_generator`` needs."""
        # By reference, not by value: a graph that is captured meanwhile registers the replica's own state.
        default = _default_generator(device)
        previous = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        return previous

    def restore_generator(self, device: torch.device, generator: torch.Generator, previous: torch.Generator) -> None:
        """Ends ``swap_generator``: ``generator`` has advanced, and the default generator draws as before."""
        _default_generator(device).graphsafe_set_state(previous)

    def graph_pool(self, device: torch.device) -> Any:
        return torch.cuda.graph_pool_handle()

    def graph(self, device: torch.device, generators: Sequence[torch.Generator], pool: Any) -> DeviceGraph:
        # The default one is drawn from where no replica swaps it for its own: by the default strategy.
        registered = [*generators, _default_generator(device)]
        return DeviceGraph(device, registered, pool, self.side_stream(device, "recording"))

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A copy in pinned host memory, and the event behind it. The host does not wait."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, self.record(self.current_stream(tensor.device))

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def to_device(self, tensor: torch.Tensor, device: LogicalDevice, stream: torch.cuda.Stream) -> torch.Tensor:
        """A copy on the device, queued on ``stream``; the device's own stream must wait for an event of ``stream``."""
        with self.on_stream(stream):
            copied = tensor.to(device.torch_device, non_blocking=True)
        # It is of the copying stream's memory: without this a later copy would get it as soon as it is dropped.
        self.use_on(copied, self.stream(device))
        return copied


def _statistic(device: torch.device, name: str, which: str) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device)[name]["all"][which])


def _default_generator(device: torch.device) -> torch.Generator:
    # torch.cuda.default_generators is an empty tuple until CUDA has been initialised.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    generator: torch.Generator = torch.cuda.default_generators[device.index]
    return generator


@dataclass(frozen=True)
class StreamEvent:
    """A point in the work of one stream of a GPU."""

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
    if physical.kind == "CPU":
        return None
    # ``config`` stands below this package, and does not name the type of the driver that it keeps.
    return _driver() if physical.driver is None else cast("DeviceDriver", physical.driver)


@cache
def _driver() -> DeviceDriver:
    return DeviceDriver()
