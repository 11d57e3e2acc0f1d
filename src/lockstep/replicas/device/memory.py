"""The memory of a logical device: the size of its pool, its peak, and the error when it is above the limit.

Pure bookkeeping on what a driver reports. ``reserved`` is what a pool has taken from the GPU: for tensors, and cached
for later ones. Nobody else can use it, so it is first compared with the ``memory_limit``. Cached memory is no fault of
the step, so only the peak of its tensors ends a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import DeviceMemoryError

MB = 2**20


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """The size of a pool, in bytes.

    Args:
        in_use: the bytes in tensors.
        reserved: the bytes taken from the GPU, for tensors and cached for later ones.
    """

    in_use: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one logical device, in bytes.

    Args:
        name: the name of the logical device.
        limit: its ``memory_limit``; None without a limit.
        in_use: the bytes in tensors.
        reserved: the bytes taken from the GPU, for tensors and cached for later ones.
        peak: the maximum of ``reserved``.
    """

    name: str
    limit: int | None
    in_use: int
    reserved: int
    peak: int

    def sizes_mb(self) -> dict[str, float]:
        """The sizes in MB (2**20 bytes) by name; "limit" only if there is one."""
        sizes = {"in_use": self.in_use, "reserved": self.reserved, "peak": self.peak}
        return {name: size / MB for name, size in sizes.items()} | (
            {} if self.limit is None else {"limit": self.limit / MB}
        )


class MemoryAccount:
    """The account of one logical device's pool.

    Args:
        name: the name of the logical device.
        limit_mb: its ``memory_limit`` in MB; None for no limit.
    """

    def __init__(self, name: str, limit_mb: int | None) -> None:
        self._name = name
        self._limit = None if limit_mb is None else limit_mb * MB
        self._seen: int | None = None
        self.moved = True
        """Whether the size of the pool may have changed since ``begin``."""
        self.reserved = 0
        self.peak = 0
        self.static = 0
        """The bytes in tensors at the beginning of a run: weights and optimizer state."""

    @property
    def name(self) -> str:
        """The name of the logical device."""
        return self._name

    @property
    def limit(self) -> int | None:
        """The limit in bytes; None without a limit."""
        return self._limit

    @property
    def overdrawn(self) -> bool:
        """Whether the pool is larger than the limit."""
        return self._limit is not None and self.reserved > self._limit

    def outdated(self, resizes: int) -> bool:
        """Whether the pool may have another size than at the last ``enter``."""
        return resizes != self._seen

    def enter(self, pool: PoolUse, resizes: int) -> None:
        """Notes the size of the pool, and the driver's count of resizes."""
        self._seen = resizes
        self.moved = True
        self.reserved = pool.reserved
        self.peak = max(self.peak, pool.reserved)

    def begin(self, pool: PoolUse) -> None:
        """Notes the size of the pool before a run."""
        self.static = pool.in_use
        self.moved = False

    def check(self, top: int, rows: int | None) -> None:
        """Compares the peak of the step's tensors with the limit.

        Args:
            top: the peak in bytes.
            rows: the examples in the replica's shard; None if unknown.

        Raises:
            DeviceMemoryError: it is above the limit. The message names the largest batch expected to fit, assuming that
                what exceeds ``static`` is proportional to the rows.
        """
        if self._limit is None or top <= self._limit:
            return
        raise DeviceMemoryError(
            f"{self._name} has a memory_limit of {self._limit // MB} MB, but the step took {top / MB:.0f} MB; "
            f"{self._advice(self._limit, top, rows)}"
        )

    def _advice(self, limit: int, top: int, rows: int | None) -> str:
        if not rows or top <= self.static:
            return "use a smaller batch or a larger memory_limit"
        fits = max(0, (limit - self.static) * rows // (top - self.static))
        if fits:
            return f"the largest per-replica batch expected to fit is {fits} (this one had {rows})"
        static = f"{self.static / MB:.0f} MB of weights and state"
        return f"not even one example fits beside the {static}; use a larger share"


def out_of_memory(account: MemoryAccount, pool: PoolUse, *, free: int, total: int, rows: int | None) -> str:
    """The error message if the GPU itself has no more memory.

    Args:
        account: the account of the logical device.
        pool: the present size of its pool.
        free: the free bytes of the GPU.
        total: all bytes of the GPU.
        rows: the examples in the replica's shard; None if unknown.
    """
    limit = "" if account.limit is None else f" of a memory_limit of {account.limit // MB} MB"
    batch = f" than the {rows} examples of this one" if rows else ""
    return (
        f"{account.name} got no more memory from its GPU: its tensors took {pool.in_use / MB:.0f} MB{limit}, and of "
        f"the GPU's {total / MB:.0f} MB {free / MB:.0f} MB are free; use a smaller per-replica batch{batch}, or end "
        "other programs on the GPU"
    )
