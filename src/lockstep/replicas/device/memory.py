"""The memory of logical devices: what it is, how it is counted, and the errors beyond a limit.

A pool's cached memory can be used by no other program, so all memory that it has taken is compared with the
``memory_limit`` first; but cached memory is not the step's fault, so only the peak of its tensors ends a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import DeviceMemoryError
from lockstep.replicas.device.driver import PoolUse

MB = 2**20


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one logical device, in bytes: see ``PoolUse``; ``peak`` is the maximum of ``reserved``."""

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
    """The account of one logical device's pool. Sizes are in bytes.

    Attributes:
        static: the bytes in tensors at the beginning of a run: weights and optimizer state.
        moved: whether the size of the pool may have changed since ``begin``.
    """

    def __init__(self, name: str, limit_mb: int | None) -> None:
        self.name = name
        self.limit = None if limit_mb is None else limit_mb * MB
        self.reserved = self.peak = self.static = 0
        self.moved = True
        self._seen: int | None = None

    @property
    def overdrawn(self) -> bool:
        return self.limit is not None and self.reserved > self.limit

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
        self.static = pool.in_use
        self.moved = False

    def check(self, top: int, rows: int | None) -> None:
        """Raises a DeviceMemoryError if ``top``, the peak of the step's tensors, is above the limit.

        It names the largest batch expected to fit, if all but ``static`` is proportional to the shard's ``rows``.
        """
        if self.limit is None or top <= self.limit:
            return
        raise DeviceMemoryError(
            f"{self.name} has a memory_limit of {self.limit // MB} MB, but the step took {top / MB:.0f} MB; "
            f"{self._advice(self.limit, top, rows)}"
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
    """The error message if the GPU itself, with ``free`` of ``total`` bytes free, has no more memory."""
    limit = "" if account.limit is None else f" of a memory_limit of {account.limit // MB} MB"
    batch = f" than the {rows} examples of this one" if rows else ""
    return (
        f"{account.name} got no more memory from its GPU: its tensors took {pool.in_use / MB:.0f} MB{limit}, and of "
        f"the GPU's {total / MB:.0f} MB {free / MB:.0f} MB are free; use a smaller per-replica batch{batch}, or end "
        "other programs on the GPU"
    )
