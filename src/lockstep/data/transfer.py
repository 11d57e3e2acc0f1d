"""Moves every replica's shard of a batch to its device.

    reading thread:     pinned memory --copied on a separate stream--> device; an event is recorded after the copies
    consumer's thread:  whatever it queues from now on runs after that event

On a CPU nothing is copied. On a GPU the copies of the next batches overlap with the running step, and only the device
waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch

from lockstep._torch_compat import tree_map
from lockstep.collectives.per_replica import PerReplica, with_values
from lockstep.config import LogicalDevice
from lockstep.data.prefetch import ClosableIterator
from lockstep.data.ragged import is_foreign, ragged_to
from lockstep.data.structure import RowList, RowTuple, is_plain, map_leaves
from lockstep.replicas.device.driver import StreamEvent, driver_of


class _InFlight(NamedTuple):
    """A batch in flight: its copies, and the events after which all of them are complete."""

    marks: list[StreamEvent]
    copies: list[torch.Tensor]


class Transfer:
    """Puts batches with PerReplica leaves on the replicas' devices, which are given in replica order.

    Use a batch only when it comes from ``received``: its copies may still be in flight when a call returns.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self._devices = tuple(devices)
        gpus = {device.physical: (driver, device) for device in devices if (driver := driver_of(device)) is not None}
        self._all_on_cpu = all(device.torch_device.type == "cpu" for device in devices)
        self._copying = {
            physical: (driver, device.torch_device, driver.side_stream(device.torch_device, "copy"))
            for physical, (driver, device) in gpus.items()
        }
        # By the id of the batch, which is alive until it has been received.
        self._in_flight: dict[int, _InFlight] = {}
        self._read_from: deque[tuple[list[StreamEvent], list[torch.Tensor]]] = deque()

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with every tensor on its replica's device, and other values as they are."""
        if self._all_on_cpu and _is_on_cpu(batch):
            return batch
        in_flight = _InFlight([], [])
        sources: list[torch.Tensor] = []

        def move(value: Any, device: LogicalDevice) -> Any:
            if isinstance(value, (RowList, RowTuple)):
                return value if driver_of(device) is None else tree_map(lambda leaf: move(leaf, device), value)
            if is_plain(value) and device.physical in self._copying and value.device.type == "cpu":
                driver, _, stream = self._copying[device.physical]
                # Only a copy from pinned memory runs beside the step; one from pageable memory makes the host wait.
                sources.append(driver.pinned(value))
                in_flight.copies.append(driver.to_device(sources[-1], device, stream))
                return in_flight.copies[-1]
            if isinstance(value, torch.Tensor):
                return value.to(device.torch_device)
            return ragged_to(value, device.torch_device) if is_foreign(value) else value

        def move_attributes(attributes: Any) -> Any:
            pairs = zip(attributes, self._devices, strict=True) if attributes else ()
            moved = [value.mapped(partial(move, device=device)) for value, device in pairs]
            return PerReplica(moved) if moved else attributes

        moved = map_leaves(
            lambda _, leaf: with_values(leaf, list(map(move, leaf, self._devices))), batch, attributes=move_attributes
        )
        if sources:
            for driver, device, stream in self._copying.values():
                in_flight.marks.append(StreamEvent(driver, device, driver.record(stream)))
            self._in_flight[id(moved)] = in_flight
            # The sources live until they have been copied: else their memory might be reused and overwritten.
            self._read_from.append((in_flight.marks, sources))
            # Asked, not waited for: memory that is still being copied is let go after a later batch.
            while self._read_from and all(mark.driver.query(mark.event) for mark in self._read_from[0][0]):
                self._read_from.popleft()
        return moved

    def received(self, batches: ClosableIterator[Any]) -> ClosableIterator[Any]:
        """Returns the batches for the calling thread, whose work on the devices will run after their copies."""
        return self._received(batches) if self._copying else batches

    def _received(self, batches: ClosableIterator[Any]) -> Generator[Any, None, None]:
        with closing(batches):
            for batch in batches:
                self.receive(batch)
                yield batch
                del batch  # while the next one is made

    def receive(self, batch: Any) -> None:
        """Makes whatever the calling thread queues from now on run after the copies of ``batch``."""
        in_flight = self._in_flight.pop(id(batch), None)
        if in_flight is None:
            return
        for mark in in_flight.marks:
            mark.wait()
            stream = mark.driver.current_stream(mark.device)
            for copy in in_flight.copies:
                if copy.device == mark.device:
                    # Without this the allocator knows only the stream of the copy, and may hand the memory out again
                    # while the step still reads it (test_what_reaches_a_gpu_is_complete_and_stays_while_it_is_read).
                    mark.driver.use_on(copy, stream)


def _is_on_cpu(batch: Any) -> bool:
    """Whether a batch is nothing but a tuple, list or dict of tensors that are on the CPU already."""
    kind = type(batch)
    if kind is not tuple and kind is not list and kind is not dict:
        return False
    for shards in batch.values() if kind is dict else batch:
        if type(shards) is not PerReplica:
            return False
        for shard in shards.values:
            if type(shard) is not torch.Tensor or not shard.is_cpu:
                return False
    return True
