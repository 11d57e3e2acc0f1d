"""Replicas on GPUs: their issue slots, and the order of work on their streams.

    caller      --x.......................................x-->   x  an event is recorded, and others wait for it
    replica 0     '--forward--backward--x.......x--update-'      .  nothing is queued here meanwhile
    replica 1     '--forward--backward--x.......x--update-'
    meeting                             '--sum--'

Replicas of one GPU issue one after another and hand over at collectives, so random numbers drawn from the GPU's
generator during a slot are that replica's. Events keep the order. They also make memory safe, which torch reuses on the
stream on which it was allocated: others use a replica's memory only while values are combined, before it continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from lockstep.config import LogicalDevice
from lockstep.errors import DeviceMemoryError
from lockstep.replicas.device.driver import DeviceDriver, StreamEvent, driver_of
from lockstep.replicas.device.memory import MemoryAccount
from lockstep.replicas.issue_gate import IssueGate


class GpuReplica:
    """The state of a replica on a GPU between its slots: its stream, its generator, the account of its memory."""

    def __init__(self, device: LogicalDevice, driver: DeviceDriver, seed: int) -> None:
        self.account = MemoryAccount(device, driver)
        self.device = device
        self.driver = driver
        self.stream = driver.stream(device)
        self.generator = driver.new_generator(device.torch_device, seed)


class GpuSlot:
    """The issue slot of one replica on its GPU, whose gate has width 1: a gate, and what CPUs do not need.

    ``rows`` is the length of the replica's shard, for messages. A replica ``alone`` in its process needs no events.
    """

    def __init__(self, gate: IssueGate, replica: GpuReplica, rows: int | None, *, alone: bool = False) -> None:
        self._gate = gate
        self._replica = replica
        self._rows = rows
        self._alone = alone
        self._resources: ExitStack | None = None
        self._default_state: Any = None

    def acquire(self) -> None:
        """Waits for the slot, then makes the replica's stream and generator the GPU's current ones."""
        self._gate.acquire()
        replica = self._replica
        with ExitStack() as resources:
            resources.callback(self._gate.release)
            resources.enter_context(replica.driver.on_stream(replica.stream))
            resources.enter_context(self._drawing())
            replica.account.begin_peak()
            # Only now: if a step above fails, for lack of memory, the gate and the generator are given back here.
            self._resources = resources.pop_all()

    def release(self) -> None:
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()

    def check(self) -> None:
        """Checks what the replica has done before others use its results."""
        self._replica.account.check(self._rows)

    def record_event(self) -> StreamEvent | None:
        """An event behind what the replica has queued; None if nobody waits for it."""
        # Alone there is no other stream that would have to wait.
        if self._alone:
            return None
        driver = self._replica.driver
        return StreamEvent(driver, self._replica.device.torch_device, driver.record(self._replica.stream))

    @contextmanager
    def with_default_rng(self) -> Iterator[None]:
        """A block of work for all replicas, which draws no random numbers of this one's device."""
        replica, gpu = self._replica, self._replica.device.torch_device
        replica.driver.restore_generator(gpu, replica.generator, self._default_state)
        try:
            yield
        finally:
            self._default_state = replica.driver.swap_generator(gpu, replica.generator)
            replica.account.begin_peak()  # temporary memory of the block is not charged to the replica

    @contextmanager
    def naming_device(self) -> Iterator[None]:
        """A block in which an out-of-memory error names the logical device."""
        try:
            yield
        except DeviceMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            raise self._replica.account.out_of_memory(self._rows) from error

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        replica, gpu = self._replica, self._replica.device.torch_device
        self._default_state = replica.driver.swap_generator(gpu, replica.generator)
        try:
            yield
        finally:
            replica.driver.restore_generator(gpu, replica.generator, self._default_state)


class RunStreams:
    """All streams of a strategy's GPUs during one run, and those on which values of all replicas are combined.

    A context manager around a run: replicas start behind the caller's earlier work, and the caller's later work runs
    behind theirs. CPUs have no streams, and a single replica combines values on its own.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        drivers = [(device, driver) for device in devices if (driver := driver_of(device)) is not None]
        self._gpus = {device.physical: driver for device, driver in drivers}
        self._meeting = [
            (driver, gpu.torch_device, driver.side_stream(gpu.torch_device, "meeting"))
            for gpu, driver in (self._gpus.items() if len(devices) > 1 else ())
        ]
        shares = [(driver, device.torch_device, driver.stream(device)) for device, driver in drivers]
        self._all = [*shares, *self._meeting]

    @property
    def any_meeting(self) -> bool:
        """Whether there are streams for combining values."""
        return bool(self._meeting)

    def __enter__(self) -> RunStreams:
        events = [driver.record(driver.current_stream(gpu.torch_device)) for gpu, driver in self._gpus.items()]
        for driver, _, stream in self._all:
            for event in events:
                driver.wait(stream, event)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # A device that has failed may fail here too; the first error is the one to report
        # (test_at_the_end_of_a_run_that_failed_the_first_error_is_told).
        with nullcontext() if kind is None else suppress(RuntimeError):
            for event in self._record(self._all):
                event.wait()

    @contextmanager
    def after(self, events: Sequence[StreamEvent]) -> Iterator[None]:
        """A block that queues work for combining behind ``events``, with the first replica's device as current."""
        with ExitStack() as stack:
            # In reverse, so that the innermost block, and with it the current device, is the first GPU's.
            for driver, _, stream in reversed(self._meeting):
                stack.enter_context(driver.on_stream(stream))
            for event in events:
                event.wait()
            yield

    def record_events(self) -> Sequence[StreamEvent]:
        """Events behind what has been queued on the streams for combining."""
        return self._record(self._meeting)

    @staticmethod
    def _record(streams: Sequence[tuple[DeviceDriver, torch.device, Any]]) -> list[StreamEvent]:
        return [StreamEvent(driver, gpu, driver.record(stream)) for driver, gpu, stream in streams]


@contextmanager
def allocating_on(device: LogicalDevice) -> Iterator[None]:
    """A block outside replicas that allocates from the pool of ``device``, in order with the thread's other work."""
    driver = driver_of(device)
    if driver is None:
        yield
        return
    # torch's allocator books a block on the stream that is current when it is allocated, and that is the share's pool.
    share, current = driver.stream(device), driver.current_stream(device.torch_device)
    driver.wait(share, driver.record(current))
    try:
        with driver.on_stream(share):
            yield
    finally:
        driver.wait(current, driver.record(share))
