"""A replica's turn on a GPU: its random numbers, and the memory of its share.

Replicas of one GPU issue one at a time and hand over at collectives. So what is drawn from the device's generator and
what is allocated between taking a turn and giving it up is this replica's, and can be kept apart from the others'.
"""

from __future__ import annotations

import torch

from lockstep.collectives.turns import Turns
from lockstep.config import LogicalDevice
from lockstep.errors import DeviceMemoryError

MB = 2**20


class CudaTurn:
    """One replica's turn on its GPU.

    Args:
        turns: the gate of the physical device, of width 1.
        device: the replica's logical device.
        state: this replica's random state and memory, kept between runs.
        rows: the length of the replica's shard, for the message when memory does not suffice; None if unknown.
    """

    def __init__(self, turns: Turns, device: LogicalDevice, state: CudaReplicaState, rows: int | None) -> None:
        self._turns = turns
        self._device = device
        self._state = state
        self._rows = rows

    def acquire(self) -> None:
        """Waits for the device, then makes its generator and its memory statistics this replica's."""
        self._turns.acquire()
        index = self._device.torch_device
        torch.cuda.set_device(index)
        self._state.others_random = torch.cuda.get_rng_state(index)
        torch.cuda.set_rng_state(self._state.random, index)
        torch.cuda.reset_peak_memory_stats(index)
        self._state.allocated_before = torch.cuda.memory_allocated(index)

    def release(self) -> None:
        """Gives the device up.

        Raises:
            DeviceMemoryError: the replica has held more than its share's ``memory_limit``.
        """
        index = self._device.torch_device
        state = self._state
        state.random = torch.cuda.get_rng_state(index)
        torch.cuda.set_rng_state(state.others_random, index)
        peak = state.held + torch.cuda.max_memory_allocated(index) - state.allocated_before
        static, state.held = state.held, state.held + torch.cuda.memory_allocated(index) - state.allocated_before
        self._turns.release()
        check_share(self._device.name, self._device.memory_limit, peak, static=static, rows=self._rows)


class CudaReplicaState:
    """What a replica on a GPU keeps between its turns: its generator's state and the bytes that it holds."""

    def __init__(self, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.random = generator.get_state()
        self.others_random = self.random
        self.held = 0
        self.allocated_before = 0


def check_share(name: str, limit_mb: int | None, peak: int, *, static: int, rows: int | None) -> None:
    """Holds a replica's peak against its share.

    Args:
        name: the logical device's name.
        limit_mb: the share in MB; None is no limit.
        peak: bytes held at the most during the turn.
        static: bytes held before it: weights, optimizer state.
        rows: examples in the replica's shard; None if unknown.

    Raises:
        DeviceMemoryError: the peak is above the limit; the message names the largest batch expected to fit, taking
            what exceeds ``static`` to grow in proportion to the rows.
    """
    if limit_mb is None or peak <= limit_mb * MB:
        return
    advice = "use a smaller batch or a larger memory_limit"
    if rows and peak > static:
        fits = max(0, int((limit_mb * MB - static) * rows / (peak - static)))
        advice = (
            f"the largest per-replica batch expected to fit is {fits} (this one had {rows})"
            if fits
            else f"not even one example fits beside the {static / MB:.0f} MB of weights and state; use a larger share"
        )
    raise DeviceMemoryError(
        f"{name} has a memory_limit of {limit_mb} MB, but the step took {peak / MB:.0f} MB; {advice}"
    )
