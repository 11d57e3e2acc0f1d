"""A collated global batch, divided among the replicas.

The batch is collated once, whole, so that all shards are padded alike: the shapes are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.collectives.per_replica import PerReplica, select
from lockstep.collectives.workers import Workers
from lockstep.data.layout import BatchLayout
from lockstep.data.sharding import batch_rows, local_cut, local_shards
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


def divided(batch: Mapping[str, Any], workers: Workers, layout: BatchLayout, *, shifted: bool) -> PerReplica[Shard]:
    """The parts of this worker's replicas, in replica order; views of the batch's own memory.

    Args:
        batch: collated, all of it.
        workers: all workers, each of which has the same batch.
        layout: finds the lists of one item per example, such as texts or boxes.
        shifted: as for ``count_items``.

    Raises:
        DataError: the tensors disagree in length, or something cannot be divided.
    """
    marked = layout.marked(dict(batch))
    rows = batch_rows(marked)
    cut = local_cut(rows, workers)
    local = local_shards(marked, lambda _: cut, layout)
    total = count_items(marked, rows, shifted=shifted)
    shards = []
    for replica, size in enumerate(cut.sizes):
        inputs = select(local, replica, len(cut.sizes))
        count = count_items(inputs, size, shifted=shifted)
        shards.append(Shard(inputs=inputs, rows=size, count=count, total=total))
    return PerReplica(shards)
