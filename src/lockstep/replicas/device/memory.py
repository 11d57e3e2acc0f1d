"""The memory of a logical device: what its pool has, the most it had, and what is said when that is above the limit.

Pure bookkeeping on what a driver reports. A pool has what it has taken from the GPU, ``reserved``: tensors, and room
that it keeps for the next ones. Nobody else can use that, so it is what a ``memory_limit`` is first compared with; but
room that is only kept is no fault of the step, so what ends a step is the most that its tensors took.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import DeviceMemoryError

MB = 2**20


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """What a pool has now, in bytes.

    Args:
        in_use: of tensors.
        reserved: taken from the GPU: for tensors, and kept for later ones.
    """

    in_use: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one logical device, in bytes.

    Args:
        name: the logical device's.
        limit: its ``memory_limit``; None where there is none.
        in_use: of tensors now.
        reserved: that its pool has taken from the GPU: for tensors, and kept for later ones.
        peak: the most that ``reserved`` has been.
    """

    name: str
    limit: int | None
    in_use: int
    reserved: int
    peak: int

    def sizes_mb(self) -> dict[str, float]:
        """The sizes in MB (2**20 bytes), by name; without the limit where there is none."""
        sizes = {"in_use": self.in_use, "reserved": self.reserved, "peak": self.peak}
        return {name: size / MB for name, size in sizes.items()} | (
            {} if self.limit is None else {"limit": self.limit / MB}
        )


class MemoryAccount:
    """What one logical device's pool has had.

    Args:
        name: the logical device's.
        limit_mb: its share in MB; None is no limit.
    """

    def __init__(self, name: str, limit_mb: int | None) -> None:
        self._name = name
        self._limit = None if limit_mb is None else limit_mb * MB
        self._seen: int | None = None
        self.moved = True
        """Whether the pool has had another size since ``begin``, or it has never been called."""
        self.reserved = 0
        self.peak = 0
        self.static = 0
        """What its tensors took at the beginning of a run: weights, optimizer state."""

    @property
    def name(self) -> str:
        """The logical device's."""
        return self._name

    @property
    def limit(self) -> int | None:
        """In bytes; None where there is none."""
        return self._limit

    @property
    def overdrawn(self) -> bool:
        """Whether the pool has more than the limit."""
        return self._limit is not None and self.reserved > self._limit

    def outdated(self, resizes: int) -> bool:
        """Whether pools may have another size than when this one was entered last."""
        return resizes != self._seen

    def enter(self, pool: PoolUse, resizes: int) -> None:
        """Notes what the pool has, and after how many resizes."""
        self._seen = resizes
        self.moved = True
        self.reserved = pool.reserved
        self.peak = max(self.peak, pool.reserved)

    def begin(self, pool: PoolUse) -> None:
        """Notes what the pool has before a run."""
        self.static = pool.in_use
        self.moved = False

    def check(self, top: int, rows: int | None) -> None:
        """Holds what the step's tensors took against the limit.

        Args:
            top: bytes, at the most.
            rows: examples in the replica's shard; None if unknown.

        Raises:
            DeviceMemoryError: it is above; the message names the largest batch expected to fit, taking what exceeds
                ``static`` to grow in proportion to the rows.
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
    """What is said when the GPU itself has no more.

    Args:
        account: the logical device's that asked for it.
        pool: what its pool has now.
        free: bytes of the GPU that nobody has taken.
        total: its bytes.
        rows: examples in the replica's shard; None if unknown.
    """
    limit = "" if account.limit is None else f" of a memory_limit of {account.limit // MB} MB"
    batch = f" than the {rows} examples of this one" if rows else ""
    return (
        f"{account.name} got no more memory from its GPU: its tensors took {pool.in_use / MB:.0f} MB{limit}, and of "
        f"the GPU's {total / MB:.0f} MB {free / MB:.0f} MB are free; use a smaller per-replica batch{batch}, or end "
        "other programs on the GPU"
    )
