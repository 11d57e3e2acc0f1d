"""Moving every replica's part of a batch to its device.

On a CPU nothing is copied. To a GPU the copies go through a stream of their own, so that they overlap with the step
that is running; a batch is handed on when they are complete, so it may be read from any stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.collectives.per_replica import PerReplica
from lockstep.config import LogicalDevice
from lockstep.data.structure import map_leaves


class Transfer:
    """Puts batches with PerReplica leaves on the replicas' devices. Made in the thread that will use the batches.

    Args:
        devices: the replicas' devices, in replica order.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self._devices = tuple(device.torch_device for device in devices)
        gpus = {device for device in self._devices if device.type == "cuda"}
        self._copying = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}  # type: ignore[no-untyped-call]
        self._using = {gpu: torch.cuda.current_stream(gpu) for gpu in gpus}

    def __call__(self, batch: Any) -> Any:
        """The batch with every tensor on its replica's device; other values as they are."""
        moved = map_leaves(self._move_leaf, batch)
        for stream in self._copying.values():
            stream.synchronize()
        return moved

    def _move_leaf(self, _: str, leaf: PerReplica[Any]) -> PerReplica[Any]:
        return PerReplica([self._move(value, device) for value, device in zip(leaf, self._devices, strict=True)])

    def _move(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if device.type != "cuda" or value.device.type != "cpu":
            return value.to(device)
        with torch.cuda.stream(self._copying[device]):
            copied = value.to(device, non_blocking=True)
        # The memory was allocated on the copying stream: without this it would be given to a later copy as soon as
        # the batch is dropped, while kernels that read it may still be queued on the stream of its user.
        copied.record_stream(self._using[device])
        return copied
