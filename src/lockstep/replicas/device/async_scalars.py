"""The copy of scalars from a device to the host, for which the step does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.config import LogicalDevice
from lockstep.replicas.device.driver import DeviceDriver, driver_of


class AsyncScalars:
    """Numbers, and tensors of one element, that a GPU may still be computing: only ``read`` waits for them."""

    def __init__(self, values: Sequence[Any], device: LogicalDevice | None) -> None:
        self._numbers: tuple[float, ...] | None = None
        driver = None if device is None else driver_of(device)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if driver is None or device is None or not tensors:
            self._numbers = tuple(map(float, values))
            return
        self._driver: DeviceDriver = driver
        gpu = device.torch_device
        with torch.no_grad():
            # float64 holds every int32 and float32 exactly. One stacked tensor is one copy to the host.
            flat = [tensor.detach().reshape(()).to(gpu, torch.float64, non_blocking=True) for tensor in tensors]
            self._host, self._event = driver.to_host(torch.stack(flat))
        self._values = tuple(None if isinstance(value, Tensor) else float(value) for value in values)

    @property
    def arrived(self) -> bool:
        """Whether ``read`` returns without waiting."""
        return self._numbers is not None or bool(self._driver.query(self._event))

    def read(self) -> tuple[float, ...]:
        """The numbers in the order of ``values``. Waits for those that have not arrived."""
        if self._numbers is None:
            if not self._driver.query(self._event):
                self._driver.synchronize(self._event)
            arrivals = iter(self._host.tolist())
            self._numbers = tuple(next(arrivals) if value is None else value for value in self._values)
            # The pinned memory goes back to torch's cache now, not with this object, which logs may keep.
            del self._host, self._event, self._values
        return self._numbers


NO_SCALARS = AsyncScalars((), None)
