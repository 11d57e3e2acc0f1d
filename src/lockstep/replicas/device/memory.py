"""The memory of logical devices: the account that holds each replica on a GPU to its limit. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, DeviceMemoryError
from lockstep.replicas.device.driver import DeviceDriver, PoolUse

MB = 2**20
_ALLOCATION_FAILED = ("can't allocate memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "create a memory object")
"""What torch, its kernels and C++ say in a plain RuntimeError when there is no more memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no more memory, of the host or of a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATION_FAILED)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one logical device: see ``PoolUse``; ``peak`` is the maximum of ``reserved``."""

    name: str
    limit: int | None
    in_use: int
    reserved: int
    peak: int

    def sizes_mb(self) -> dict[str, float]:
        """The sizes in MB (2**20 bytes) by name; "limit" only if there is one."""
        sizes = {"in_use": self.in_use, "reserved": self.reserved, "peak": self.peak, "limit": self.limit}
        return {name: size / MB for name, size in sizes.items() if size is not None}


class MemoryAccount:
    """The memory of one replica on a GPU between its slots, beside the ``memory_limit`` of its logical device.

    A pool's cached memory can be used by no other program, so all memory that it has taken is compared with the limit
    first; but cached memory is not the step's fault, so only the peak of its tensors ends a step.

    Raises ConfigError for a limit with an allocator whose memory cannot be attributed to shares.
    """

    def __init__(self, device: LogicalDevice, driver: DeviceDriver) -> None:
        if device.memory_limit is not None and not driver.limits_pools():
            raise ConfigError(
                f"{device.name} has a memory_limit, and torch is set to use another allocator than its own, whose "
                "memory cannot be attributed to shares; leave PYTORCH_ALLOC_CONF's backend at native"
            )
        self._device, self._driver, self._gpu = device, driver, device.torch_device
        self._limit = None if device.memory_limit is None else device.memory_limit * MB
        self._reserved = self._peak = self._static = 0  # static: in tensors at the beginning of a run
        self._resizes: int | None = None  # at the last look; while they are the same, so is the pool's size
        self._looked = True  # since the last begin_run

    def memory(self) -> DeviceMemory:
        """The present and peak size of its memory pool."""
        pool = self._look()
        return DeviceMemory(
            name=self._device.name, limit=self._limit, in_use=pool.in_use, reserved=pool.reserved, peak=self._peak
        )

    def begin_run(self) -> None:
        """Notes the memory in use before a run; releases cached memory that an earlier run took beyond the limit."""
        if self._limit is None or not self._looked:
            return
        if self._reserved > self._limit:
            self._driver.release_cached(self._gpu)
        self._static = self._look().in_use
        self._looked = False

    def begin_peak(self) -> None:
        """Starts a new peak: from now on only this replica computes on the GPU."""
        if self._limit is not None:
            self._driver.reset_peak(self._gpu)

    def check(self, rows: int | None) -> None:
        """Raises a DeviceMemoryError if the tensors of the slot that ends took more than the device's limit."""
        # Counters first: pool() inspects every block, in milliseconds
        # (test_memory_is_looked_at_only_when_a_pool_has_another_size).
        gpu = self._gpu
        if self._limit is None or self._driver.resizes(gpu) == self._resizes:
            return
        pool = self._look()
        if pool.reserved <= self._limit:
            return
        # No other replica computed on the GPU during this slot, so the GPU's peak above its present use is this one's,
        # but for batches that came or went. And its tensors cannot have taken more than its pool has.
        top = min(pool.in_use + self._driver.peak(gpu) - self._driver.whole(gpu).in_use, pool.reserved)
        if top > self._limit:
            raise over_limit(self._device.name, limit=self._limit, top=top, static=self._static, rows=rows)
        self._driver.release_cached(gpu)  # only cached memory went beyond the limit
        self._look()

    def out_of_memory(self, rows: int | None) -> DeviceMemoryError:
        """The error to raise if the GPU itself has no more memory."""
        free, total = self._driver.free_and_total(self._gpu)
        in_use = self._look().in_use
        return out_of_memory(self._device.name, limit=self._limit, in_use=in_use, free=free, total=total, rows=rows)

    def _look(self) -> PoolUse:
        self._resizes = self._driver.resizes(self._gpu)
        pool = self._driver.pool(self._device)
        self._looked = True
        self._reserved = pool.reserved
        self._peak = max(self._peak, pool.reserved)
        return pool


def over_limit(name: str, *, limit: int, top: int, static: int, rows: int | None) -> DeviceMemoryError:
    """The error if a step took ``top``. It names the batch that fits if all but ``static`` grows with ``rows``."""
    advice = "use a smaller batch or a larger memory_limit"
    if rows and top > static:
        fits = max(0, (limit - static) * rows // (top - static))
        advice = f"the largest per-replica batch expected to fit is {fits} (this one had {rows})"
        if not fits:
            advice = (
                f"not even one example fits beside the {static / MB:.0f} MB of weights and state; use a larger share"
            )
    return DeviceMemoryError(
        f"{name} has a memory_limit of {limit // MB} MB, but the step took {top / MB:.0f} MB; {advice}"
    )


def out_of_memory(
    name: str, *, limit: int | None, in_use: int, free: int, total: int, rows: int | None
) -> DeviceMemoryError:
    """The error if the GPU itself, with ``free`` of ``total`` bytes free, has no more memory."""
    of_limit = "" if limit is None else f" of a memory_limit of {limit // MB} MB"
    batch = f" than the {rows} examples of this one" if rows else ""
    return DeviceMemoryError(
        f"{name} got no more memory from its GPU: its tensors took {in_use / MB:.0f} MB{of_limit}, and of the GPU's "
        f"{total / MB:.0f} MB {free / MB:.0f} MB are free; use a smaller per-replica batch{batch}, or end other "
        "programs on the GPU"
    )
