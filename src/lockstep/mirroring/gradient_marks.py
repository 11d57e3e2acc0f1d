"""Where the devices of several local replicas have come to with their gradients, for who adds these up meanwhile.

A bucket is filled by the hook of whichever replica is last, in a thread of autograd's, on that replica's stream. The
others' gradients are made on streams of their own, of which this one knows nothing: so each replica's hooks leave a
mark there, and what reads the gradients is queued behind all marks. One replica's are in the order of its one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config import LogicalDevice
from lockstep.replicas.device.driver import Mark, driver_of


class GradientMarks:
    """The last mark of each local replica on a GPU.

    Args:
        devices: of the local replicas, in replica order.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        drivers = [driver_of(device) for device in devices] if len(devices) > 1 else []
        self._sources = [
            None if driver is None else (driver, device.torch_device)
            for driver, device in zip(drivers, devices, strict=False)
        ]
        self._last: list[Mark | None] = [None] * len(self._sources)

    def note(self, replica: int) -> None:
        """Notes that a gradient of a replica is there; called by its hook, in the thread that has made it."""
        source = self._sources[replica] if self._sources else None
        if source is not None:
            driver, device = source
            self._last[replica] = Mark(driver, device, driver.record(driver.current_stream(device)))

    def precede(self) -> None:
        """What the calling thread queues from now on, on each device, runs behind the gradients noted there."""
        for mark in self._last:
            if mark is not None:
                mark.precede()
