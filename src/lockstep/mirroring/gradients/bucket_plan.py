"""Which gradients travel together between workers: pure functions on sizes and flags.

Gradients of one bucket are copied into one flat tensor, since one large message is faster than many small ones.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that something is under way soon."""
LAST_BUCKET_BYTES = 2**18
"""The last ones are smaller, since nothing is computed while they travel."""
SHARE_OF_REST = 2
"""A bucket holds at most half of what is left. Over 1 Gbit/s MobileNetV2 (9 MB) waited 67 ms a step for one bucket of
all but the first megabyte, and 0.1 ms for these, or for thirds, whose number costs another 3 ms of CPU time."""


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """The buckets of one optimizer's parameters.

    Args:
        buckets: the parameters' numbers in each bucket, in the order in which they are added up.
    """

    buckets: tuple[tuple[int, ...], ...]

    def of_parameter(self) -> dict[int, int]:
        """The bucket of each parameter."""
        return {parameter: bucket for bucket, members in enumerate(self.buckets) for parameter in members}


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[str], bucket_bytes: int, travels: Container[int] | None = None
) -> BucketPlan:
    """Divides parameters into buckets.

    Args:
        sizes: bytes of each parameter's gradient.
        kinds: what must be equal inside a bucket: its dtype.
        bucket_bytes: the most in any bucket; a larger parameter is alone.
        travels: the numbers of the parameters that have gradients; None is all of them.

    Example:
        >>> plan_buckets([4, 4, 4], ["float32"] * 3, 8).buckets
        ((2, 1), (0,))
    """
    buckets: list[list[int]] = []
    chosen = [parameter for parameter in range(len(sizes)) if travels is None or parameter in travels]
    room, kind, left = 0, "", sum(sizes[parameter] for parameter in chosen)
    for parameter in reversed(chosen):
        if not buckets or sizes[parameter] > room or kinds[parameter] != kind:
            most = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
            room = min(most, max(LAST_BUCKET_BYTES, left // SHARE_OF_REST))
            kind = kinds[parameter]
            buckets.append([])
        buckets[-1].append(parameter)
        room -= sizes[parameter]
        left -= sizes[parameter]
    return BucketPlan(buckets=tuple(map(tuple, buckets)))


def plan_runs(sizes: Sequence[int], kinds: Sequence[str], most_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Divides what goes at once, between the devices of one process: nothing is computed meanwhile.

    Args:
        sizes: bytes of each gradient.
        kinds: what must be equal inside a run: its dtype.
        most_bytes: the most in any run; a larger one is alone.

    Returns:
        The numbers in each run, ascending; the runs of a kind are together.

    Example:
        >>> plan_runs([4, 4, 4, 9], ["a", "b", "a", "a"], 8)
        ((0, 2), (3,), (1,))
    """
    runs: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        room = -1
        for number in (number for number, own in enumerate(kinds) if own == kind):
            if sizes[number] > room:
                runs.append([])
                room = most_bytes
            runs[-1].append(number)
            room -= sizes[number]
    return tuple(map(tuple, runs))


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter's part of ``flat``, one behind the other, in the parameter's own shape and memory format.

    Args:
        flat: [numbers or more], contiguous.
        parameters: of that many numbers in all.
    """
    numbers = [parameter.numel() for parameter in parameters]
    parts = flat[: sum(numbers)].split(numbers)  # type: ignore[no-untyped-call]
    return [
        part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        if _is_permuted(parameter)
        else part.view(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def _is_permuted(parameter: torch.Tensor) -> bool:
    """Whether it is in channels_last, so that its gradients are too."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(parameter.ndim)
    return layout is not None and parameter.is_contiguous(memory_format=layout)
