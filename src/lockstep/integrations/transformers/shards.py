"""A collated global batch, divided among the replicas.

The batch is collated once, whole, so that all shards are padded alike: the shapes are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.collectives.per_replica import PerReplica, select
from lockstep.collectives.workers import Workers
from lockstep.data.shards import batch_rows, local_cut, local_shards
from lockstep.integrations.transformers.shares import count_items


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One replica's part of a batch.

    Args:
        inputs: what the model is given, still where the batch was collated.
        rows: how many examples; may be 0.
        count: how many values a mean loss of them is over.
        total: how many a mean loss of the whole batch is over.
    """

    inputs: dict[str, Any]
    rows: int
    count: int
    total: int


def divided(batch: Mapping[str, Any], workers: Workers, *, shifted: bool) -> PerReplica[Shard]:
    """The parts of this worker's replicas, in replica order; views of the batch's own memory.

    Args:
        batch: collated, all of it.
        workers: all workers, each of which has the same batch.
        shifted: as for ``count_items``.

    Raises:
        DataError: the tensors disagree in length, or something cannot be divided.
    """
    lists = {name: value for name, value in batch.items() if _has_rows(value, batch)}
    tensors = {name: value for name, value in batch.items() if name not in lists}
    rows = batch_rows(tensors)
    cut = local_cut(rows, workers)
    local = local_shards(tensors, lambda _: cut)
    total = count_items(tensors, rows, shifted=shifted)
    shards = []
    for replica, size in enumerate(cut.sizes):
        first = cut.start + sum(cut.sizes[:replica])
        inputs = select(local, replica, len(cut.sizes))
        count = count_items(inputs, size, shifted=shifted)
        inputs |= {name: value[first : first + size] for name, value in lists.items()}
        shards.append(Shard(inputs=inputs, rows=size, count=count, total=total))
    return PerReplica(shards)


def _has_rows(value: Any, batch: Mapping[str, Any]) -> bool:
    """Whether it is a list of one item per example, such as texts or boxes, and no structure of tensors."""
    rows = next((len(each) for each in batch.values() if isinstance(each, Tensor) and each.ndim), None)
    if not isinstance(value, list) or len(value) != rows:
        return False
    return not all(isinstance(each, Tensor) and each.ndim and len(each) == rows for each in value)
