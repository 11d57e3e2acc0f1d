"""Batches for the hand-written loops: in pinned memory, copied to the GPU one step ahead, on a stream of their own.

    side stream     copy 1    copy 2    copy 3
    current stream            step 1    step 2     each waits for its own batch alone

The best that a loop by hand does, so that ours gains nothing from a rival's slower input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.trial import Batch


def pinned(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The batches in memory that a GPU reads by itself; a batch that comes again stays one. As they are for a CPU."""
    if device.type != "cuda":
        return list(batches)
    different = {id(batch): tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), batch) for batch in batches}
    return [different[id(batch)] for batch in batches]


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device, each issued while the step before runs.

    Args:
        batches: ``pinned`` ones, where the device is a GPU.
        device: where to.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    coming = _copied(batches[0], device, side)
    for following in (*batches[1:], None):
        using = torch.cuda.current_stream(device)
        using.wait_stream(side)
        batch = coming
        for tensor in tree_leaves(batch):
            tensor.record_stream(using)
        if following is not None:
            coming = _copied(following, device, side)
        yield batch


def _copied(batch: Batch, device: torch.device, side: torch.cuda.Stream) -> Batch:
    with torch.cuda.stream(side):
        moved: Batch = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
    return moved
