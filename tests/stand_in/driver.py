"""A driver for devices that there are not: everything is done on the CPU at once, and written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tests.stand_in.graph import GraphPool, HeldGraph, StandInGraph
from tests.stand_in.streams import Event, Stream
from tests.stand_in.tracking import Memory, Propagation
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.config import LogicalDevice
from lockstep.replicas.device.driver import PoolUse
from lockstep.replicas.device.memory import MB

CALLER = "caller"


@dataclass(frozen=True)
class Logged:
    """One call.

    Args:
        replica: whose thread asked: the name of the stream that it queues on, "caller" outside of replicas.
        call: the driver's method.
        on: the stream, device or event, by name.
    """

    replica: str
    call: str
    on: str = ""


class StandInDriver:
    """See ``DeviceDriver``. One physical device.

    Args:
        memory_mb: of the device.

    Attributes:
        log: every call that orders, waits or exchanges something.
        waits: how often the host waited for the device.
        graphs: what was recorded, and replayed, in order.
        pinned_memory: addresses of host memory that passes for pinned.
        lags: events are not passed until somebody waits for them, or ``catch_up``.
    """

    def __init__(self, memory_mb: int = 8192) -> None:
        self.log: list[Logged] = []
        self.waits = 0
        self.lags = False
        self.graphs: list[StandInGraph] = []
        self.pinned_memory: set[int] = set()
        self.memory = Memory(memory_mb * MB)
        self._lent: torch.Generator | None = None
        self._streams: dict[str, Stream] = {}
        self._events: list[Event] = []
        self._here = threading.local()
        self._lock = threading.Lock()

    @property
    def faults(self) -> list[str]:
        """What was used in an order that no event keeps."""
        return self.memory.faults

    def calls(self, name: str) -> list[Logged]:
        """The logged calls of one method."""
        return [entry for entry in self.log if entry.call == name]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows the tensors of the calling thread; those of replicas are without it."""
        with Propagation(self.memory, self._current):
            self._here.followed = True
            try:
                yield
            finally:
                self._here.followed = False

    def catch_up(self) -> None:
        """The device comes past all events."""
        for event in self._events:
            event.passed = True
        self._events.clear()

    def stream(self, device: LogicalDevice) -> Stream:
        return self._stream(device.name)

    def side_stream(self, device: torch.device, purpose: str) -> Stream:
        return self._stream(purpose)

    def current_stream(self, device: torch.device) -> Stream:
        return self._current()

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        if not getattr(self._here, "followed", False):
            self._here.followed = True
            Propagation(self.memory, self._current).__enter__()  # for good: the thread is a replica's
        before = self._current()
        self._note("on_stream", stream.name)
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def record(self, stream: Stream) -> Event:
        event = Event(f"{stream.name}@{stream.now}", stream.clock.copy(), passed=not self.lags)
        if self.lags:
            self._events.append(event)
        self._note("record", event.name)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._note("wait", f"{stream.name} for {event.name}")
        stream.learn(event.clock)

    def query(self, event: Event) -> bool:
        self._note("query", event.name)
        return event.passed

    def synchronize(self, event: Event) -> None:
        self._note("synchronize", event.name)
        self.waits += 1
        event.passed = True
        for other in self._events:
            other.passed |= other.clock <= event.clock
        with self._lock:
            for stream in self._streams.values():  # whatever the host queues next, anywhere, is behind it
                stream.learn(event.clock)

    def use_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._note("use_on", stream.name)
        block = self.memory.block(tensor)
        if block is not None:
            block.kept_for.add(stream.name)

    def peak(self, device: torch.device) -> int:
        return self.memory.peak

    def reset_peak(self, device: torch.device) -> None:
        self.memory.peak = self.memory.in_use.total()

    def resizes(self, device: torch.device) -> int:
        return self.memory.resizes

    def pool(self, device: LogicalDevice) -> PoolUse:
        self._note("pool", device.name)
        return PoolUse(in_use=self.memory.in_use[device.name], reserved=self.memory.reserved[device.name])

    def whole(self, device: torch.device) -> PoolUse:
        return PoolUse(in_use=self.memory.in_use.total(), reserved=self.memory.reserved.total())

    def product(self, device: torch.device) -> str:
        return "stand-in"

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        return self.memory.capacity - self.memory.reserved.total(), self.memory.capacity

    def release_cached(self, device: torch.device) -> None:
        self._note("release_cached")
        self.memory.give_back()

    def limits_pools(self) -> bool:
        return True

    def new_generator(self, device: torch.device, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def swap_generator(self, device: torch.device, own: torch.Generator) -> torch.Tensor:
        self._note("swap_generator")
        self._lent = own
        others = torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state())
        return others

    def restore_generator(self, device: torch.device, own: torch.Generator, others: torch.Tensor) -> None:
        self._note("restore_generator")
        self._lent = None
        own.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(others)

    def graph_pool(self, device: torch.device) -> GraphPool:
        return GraphPool()

    def graph(self, device: torch.device, generators: Sequence[torch.Generator], pool: GraphPool) -> HeldGraph:
        self._note("graph")
        held = HeldGraph(StandInGraph(generators, lambda: self._lent), pool)
        self.graphs.append(held.graph)
        return held

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._note("to_host")
        with _disable_current_modes():
            host = tensor.detach().clone()
        return host, self.record(self._current())

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self.pinned_memory:
            return tensor
        self._note("pinned")
        with _disable_current_modes():
            copied = tensor.clone()
        self.pinned_memory.add(copied.untyped_storage().data_ptr())
        return copied

    def to_device(self, tensor: torch.Tensor, device: LogicalDevice, stream: Stream) -> torch.Tensor:
        self._note("to_device", device.name)
        with _disable_current_modes():
            copied = tensor.clone()  # what is the host's is not followed
        stream.advance()
        self.memory.allocate(copied, stream).use(stream, writes=True)
        self.use_on(copied, self.stream(device))
        return copied

    def _stream(self, name: str) -> Stream:
        with self._lock:
            return self._streams.setdefault(name, Stream(name))

    def _current(self) -> Stream:
        stream: Any = getattr(self._here, "stream", None)
        return self._stream(CALLER) if stream is None else stream

    def _note(self, call: str, on: str = "") -> None:
        self.log.append(Logged(self._current().name, call, on))
