"""The stopwatch where a step is only issued: it waits for the device at the ends of laps of many steps, never between.

A wait after each step would take from every loop what it is measured for: that it runs ahead of the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.setting import Pace
from benchmarks.laps import Laps

_MB = 2**20


class DeviceLaps:
    """Counts steps, and stops a lap of the trial's stopwatch when enough have been issued and done.

    Args:
        laps: the trial's; its laps are those of ``pace``, the first one being the warm-up.
        pace: how many steps a lap has.
        device: that is waited for, with all its streams.
    """

    def __init__(self, laps: Laps, pace: Pace, device: torch.device) -> None:
        self._laps = laps
        self._pace = pace
        self._device = device
        self._steps = 0

    def step(self, loss: Callable[[], float]) -> None:
        """A step has been issued.

        Args:
            loss: reads the mean loss of all steps so far; called once, when the last one is done.
        """
        self._steps += 1
        if not self._pace.ends_lap(self._steps):
            return
        wait_for(self._device)
        last = self._steps == self._pace.steps
        if last:
            self._laps.device_reserved_mb, self._laps.device_used_mb = device_memory(self._device)
        self._laps.lap(loss() if last else float("nan"))


def wait_for(device: torch.device) -> None:
    """Returns when everything issued to the device, on any stream, is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> tuple[float, float]:
    """MB: what this process's allocator has taken of the device, and what all processes have of it now.

    The allocator keeps what it has once taken, and so the first is a peak; torch's own peak will not do, since replicas
    on shares of a GPU reset it at every turn. The second is the driver's number: contexts and libraries are part of it.
    Zeros for a CPU.
    """
    if device.type != "cuda":
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device) / _MB, (total - free) / _MB
