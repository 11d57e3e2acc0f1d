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
        self._known: tuple[float, ...] | None = None
        driver = None if device is None else driver_of(device)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if driver is None or device is None or not tensors:
            self._known = tuple(map(float, values))
            return
        self._driver: DeviceDriver = driver
        gpu = device.torch_device
        with torch.no_grad():
            flat = [each.detach().reshape(()).to(gpu, torch.float64, non_blocking=True) for each in tensors]
            self._host, self._event = driver.to_host(torch.stack(flat))
        self._values = tuple(None if isinstance(value, Tensor) else float(value) for value in values)

    @property
    def arrived(self) -> bool:
        """Whether ``read`` returns without waiting."""
        return self._known is not None or bool(self._driver.query(self._event))

    def read(self) -> tuple[float, ...]:
        """The numbers in the order of ``values``. Waits for those that have not arrived."""
        if self._known is None:
            if not self._driver.query(self._event):
                self._driver.synchronize(self._event)
            came = iter(self._host.tolist())
            self._known = tuple(next(came) if value is None else value for value in self._values)
            del self._host, self._event, self._values
        return self._known


NO_SCALARS = AsyncScalars((), None)
