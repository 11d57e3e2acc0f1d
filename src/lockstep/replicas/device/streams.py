"""Replicas on GPUs: one issues at a time, each on its own stream, and events keep the order that the program has.

    caller      --x.......................................x-->   x  an event is recorded, and others wait for it
    replica 0     '--forward--backward--x.......x--update-'      .  nothing is queued here meanwhile
    replica 1     '--forward--backward--x.......x--update-'
    meeting                             '--sum--'

Replicas of one GPU issue one after another and hand over at collectives, so what is drawn from the GPU's generator
in a slot is that replica's; but the GPU works on all their streams at once.

Memory needs no more than these events. torch uses freed memory again on the stream that it was allocated on. What a
share has allocated is used by others in meetings alone, and its stream goes on behind each of them; what a meeting has
allocated is used by replicas, and the next meeting begins behind all of them; and so it is at both ends of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from lockstep.collectives.replica_barrier import DeviceEvent, IssueGate
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, DeviceMemoryError
from lockstep.replicas.device.driver import DeviceDriver, StreamEvent, driver_of
from lockstep.replicas.device.memory import DeviceMemory, MemoryAccount, PoolUse, out_of_memory


class GpuReplica:
    """What a replica on a GPU keeps between its slots: its stream, its generator, the account of its memory.

    Args:
        device: its logical device.
        driver: the device's.
        seed: of its generator.

    Raises:
        ConfigError: a memory_limit that torch's allocator, as it is set, cannot be held to.
    """

    def __init__(self, device: LogicalDevice, driver: DeviceDriver, seed: int) -> None:
        if device.memory_limit is not None and not driver.limits_pools():
            raise ConfigError(
                f"{device.name} has a memory_limit, and torch has been told to use another allocator than its own, "
                "whose memory cannot be told apart by share; leave PYTORCH_ALLOC_CONF's backend at native"
            )
        self.device = device
        self.driver = driver
        self.stream = driver.stream(device)
        self.generator = driver.new_generator(device.torch_device, seed)
        self.account = MemoryAccount(device.name, device.memory_limit)

    def memory(self) -> DeviceMemory:
        """What its pool has now, and the most it had."""
        pool = self.look()
        account = self.account
        return DeviceMemory(
            name=account.name, limit=account.limit, in_use=pool.in_use, reserved=pool.reserved, peak=account.peak
        )

    def look(self) -> PoolUse:
        """Enters into the account what the pool has now."""
        resizes = self.driver.resizes(self.device.torch_device)
        pool = self.driver.pool(self.device)
        self.account.enter(pool, resizes)
        return pool

    def begin_run(self) -> None:
        """Notes what the share holds before a run; gives back what an earlier one took beyond the limit."""
        if self.device.memory_limit is None or not self.account.moved:
            return
        if self.account.overdrawn:
            self.driver.give_back(self.device.torch_device)
        self.account.begin(self.look())

    def begin_peak(self) -> None:
        """From now on it is this replica that computes on the GPU."""
        if self.device.memory_limit is not None:
            self.driver.reset_peak(self.device.torch_device)

    def check(self, rows: int | None) -> None:
        """Holds the slot that ends against the share's limit.

        Raises:
            DeviceMemoryError: the tensors of the slot took more.
        """
        gpu = self.device.torch_device
        if self.device.memory_limit is None or not self.account.outdated(self.driver.resizes(gpu)):
            return
        pool = self.look()
        if not self.account.overdrawn:
            return
        # In this slot nobody else computed on the GPU, so how far its peak was above the present, this share's was: but
        # for batches that came or went. And its tensors cannot have taken more than its pool has.
        top = min(pool.in_use + self.driver.peak(gpu) - self.driver.allocated(gpu), pool.reserved)
        self.account.check(top, rows)
        self.driver.give_back(gpu)  # it was room kept for later that went beyond the limit
        self.look()

    def out_of_memory(self, rows: int | None) -> DeviceMemoryError:
        """What to raise where the GPU itself has no more: the share's name and numbers."""
        free, total = self.driver.free_and_total(self.device.torch_device)
        return DeviceMemoryError(out_of_memory(self.account, self.look(), free=free, total=total, rows=rows))


class GpuSlot:
    """One replica's slot on its GPU.

    Args:
        slots: the gate of the physical device, of width 1.
        replica: whose slot it is.
        rows: the length of the replica's shard, for messages; None if unknown.
        alone: whether there is no other replica in this process, for whose sake marks would be.
    """

    def __init__(self, slots: IssueGate, replica: GpuReplica, rows: int | None, *, alone: bool = False) -> None:
        self._slots = slots
        self._replica = replica
        self._rows = rows
        self._alone = alone
        self._held: ExitStack | None = None
        self._others: Any = None

    def acquire(self) -> None:
        """Waits for the GPU, then makes its current stream and its generator this replica's."""
        self._slots.acquire()
        replica = self._replica
        with ExitStack() as held:
            held.callback(self._slots.release)
            held.enter_context(replica.driver.on_stream(replica.stream))
            held.enter_context(self._drawing())
            replica.begin_peak()
            self._held = held.pop_all()

    def release(self) -> None:
        """Gives the GPU up."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def check(self) -> None:
        """Raises DeviceMemoryError where the slot took more memory than the share has."""
        self._replica.check(self._rows)

    def record_event(self) -> DeviceEvent | None:
        """Behind what the replica has queued so far."""
        if self._alone:
            return None
        driver = self._replica.driver
        return StreamEvent(driver, self._replica.device.torch_device, driver.record(self._replica.stream))

    def wait_for(self, events: Sequence[DeviceEvent]) -> None:
        """Lets the replica's stream, and what its thread queues on other GPUs, wait for ``marks``."""
        for event in events:
            event.wait()

    @contextmanager
    def with_default_rng(self) -> Iterator[None]:
        """Inside the block the GPU's generator is as outside of replicas."""
        replica, gpu = self._replica, self._replica.device.torch_device
        replica.driver.take_back(gpu, replica.generator, self._others)
        try:
            yield
        finally:
            self._others = replica.driver.lend(gpu, replica.generator)
            replica.begin_peak()  # what was made for all, and dropped, is not charged to the share

    @contextmanager
    def naming_device(self) -> Iterator[None]:
        """What runs out of memory in the block does so in the name of the share.

        Raises:
            DeviceMemoryError: in place of torch's own error.
        """
        try:
            yield
        except DeviceMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            raise self._replica.out_of_memory(self._rows) from error

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        replica, gpu = self._replica, self._replica.device.torch_device
        self._others = replica.driver.lend(gpu, replica.generator)
        try:
            yield
        finally:
            replica.driver.take_back(gpu, replica.generator, self._others)


class RunStreams:
    """All streams of a strategy's GPUs in one run: what is done once for all replicas, and the run's two ends.

    A context manager for a run: replicas see what the caller queued before, and the caller then sees all they did.

    Args:
        devices: the replicas'. Those on a CPU have no stream; one that is alone does on its own what is done for all.
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
        """Whether there are streams for what is done once for all."""
        return bool(self._meeting)

    def __enter__(self) -> RunStreams:
        events = [driver.record(driver.current_stream(gpu.torch_device)) for gpu, driver in self._gpus.items()]
        for driver, _, stream in self._all:
            for event in events:
                driver.wait(stream, event)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # A device that refused something may refuse this too; what it refused first is what is to be told.
        with nullcontext() if kind is None else suppress(RuntimeError):
            for event in self._record(self._all):
                event.wait()

    @contextmanager
    def after(self, events: Sequence[DeviceEvent]) -> Iterator[None]:
        """See ``slots.Common``; the current device is the first replica's, whoever does it."""
        with ExitStack() as stack:
            for driver, _, stream in reversed(self._meeting):
                stack.enter_context(driver.on_stream(stream))
            for event in events:
                event.wait()
            yield

    def record_events(self) -> Sequence[DeviceEvent]:
        """Behind what has been queued on the meeting streams."""
        return self._record(self._meeting)

    @staticmethod
    def _record(streams: Sequence[tuple[DeviceDriver, torch.device, Any]]) -> list[StreamEvent]:
        return [StreamEvent(driver, gpu, driver.record(stream)) for driver, gpu, stream in streams]


def device_memory_of(device: LogicalDevice) -> DeviceMemory | None:
    """What this process has of a logical device's memory, whatever strategy took it; None for a CPU."""
    driver = driver_of(device)
    return None if driver is None else GpuReplica(device, driver, seed=0).memory()


@contextmanager
def allocating_on(device: LogicalDevice) -> Iterator[None]:
    """What the calling thread allocates in the block is of the device's pool, in order with its other work.

    On a CPU nothing is different. Outside replicas only.
    """
    driver = driver_of(device)
    if driver is None:
        yield
        return
    own, here = driver.stream(device), driver.current_stream(device.torch_device)
    driver.wait(own, driver.record(here))
    try:
        with driver.on_stream(own):
            yield
    finally:
        driver.wait(here, driver.record(own))
