"""The settings of the communication between workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.errors import ConfigError

Compression = Literal["bf16"]


@dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """The settings of the communication between workers; equal on all of them.

    Args:
        bucket_mb: size of the largest gradient bucket, in MB (2**20 bytes). The last buckets of a step are smaller,
            since nothing is computed while they are sent.
        compression: "bf16" sends float32 gradients in bfloat16, half the bytes, with its rounding. Gradients of other
            dtypes, and all of them with None, are sent as they are.
        lost_after_s: seconds without a heartbeat after which a worker counts as lost.
        timeout_s: seconds that a worker or replica waits in a collective for one that is alive and does not come.

    Raises:
        ConfigError: a number that is not above 0, or an unknown compression.

    Example:
        >>> import lockstep as ls
        >>> options = ls.CommunicationOptions(compression="bf16", lost_after_s=60)
    """

    bucket_mb: float = 25.0
    compression: Compression | None = None
    lost_after_s: float = 15.0
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ConfigError(f"bucket_mb={self.bucket_mb!r} is no size; give a number of MB above 0, such as 25")
        if self.compression not in (None, "bf16"):
            raise ConfigError(f'compression={self.compression!r} is unknown; choose "bf16" or None')
        check_waiting_time("lost_after_s", self.lost_after_s)
        check_waiting_time("timeout_s", self.timeout_s)

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes."""
        return int(self.bucket_mb * 2**20)

    @property
    def travel_as(self) -> torch.dtype | None:
        """The dtype in which float32 gradients are sent; None is their own."""
        return torch.bfloat16 if self.compression == "bf16" else None


def check_waiting_time(name: str, seconds: float) -> None:
    """Raises a ConfigError unless a waiting time is above 0."""
    if not seconds > 0:
        raise ConfigError(f"{name}={seconds!r} is no waiting time; give a number of seconds above 0")
