"""Buffers read outside replicas: each is the mean over the replicas of all workers where it is floating."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from lockstep.collectives.reduction import sum_tensors
from lockstep.collectives.workers import Workers

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def averages(buffers: Sequence[Sequence[torch.Tensor]], workers: Workers) -> list[torch.Tensor]:
    """The mean of each floating buffer; replica 0's of the others, and where all are equal (a mean would round).

    With several workers every one must call it.

    Args:
        buffers: per buffer its local copies, one per local replica.
        workers: all workers.
    """
    floating = [copies for copies in buffers if copies[0].is_floating_point()]
    if workers.alone or not floating:
        return [_mean(copies) for copies in buffers]
    if len(set(workers.exchange("buffers", [_checksum(floating)]))) == 1:
        return [copies[0].detach() for copies in buffers]
    sums = workers.sum_tensors("averages of buffers", [sum_tensors(_at_home(copies)) for copies in floating])
    means = iter([total / workers.num_replicas for total in sums])
    return [next(means) if copies[0].is_floating_point() else copies[0].detach() for copies in buffers]


def weights_digest(module: torch.nn.Module) -> int:
    """A number that tells different weights apart, and costs one pass over them, on their device."""
    digest = 0
    with torch.no_grad():
        for parameter in module.parameters():
            digest = (digest * 31 + tensor_digest(parameter)) % 2**64
    return digest


def tensor_digest(tensor: torch.Tensor) -> int:
    """A number that tells different values apart, and costs one pass over a tensor, on its device."""
    words = _WORDS[tensor.element_size()]
    return int(tensor.detach().contiguous().reshape(-1).view(words).sum(dtype=torch.int64))


def _mean(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    here = _at_home(copies)
    if not here[0].is_floating_point() or all(torch.equal(here[0], other) for other in here[1:]):
        return here[0].detach()
    return sum_tensors(here) / len(here)


def _at_home(copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [copy.to(copies[0].device) for copy in copies]


def _checksum(buffers: Sequence[Sequence[torch.Tensor]]) -> float:
    """Of the values, if they are the same in all local replicas; NaN, which equals nothing, if not."""
    checksum = 0
    for copies in buffers:
        first, *others = _at_home(copies)
        if any(not torch.equal(first, other) for other in others):
            return float("nan")
        flat = first.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(flat.numpy().tobytes(), checksum)
    return float(checksum)
