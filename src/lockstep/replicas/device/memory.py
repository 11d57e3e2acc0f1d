"""The memory of logical devices, and the errors beyond a limit. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.errors import DeviceMemoryError

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
