"""Divides a collated batch among the replicas, and joins the outputs of an evaluation.

The batch is collated once, so that all shards are padded alike. A shard knows how many values its loss is a mean of,
and how many the loss of the whole batch; ``loss_normalization`` weighs the losses by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep._torch_compat import tree_flatten, tree_unflatten
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator, all_gather_object
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.data.batch_lists import ListReader
from lockstep.data.error_notes import WithRows
from lockstep.data.sharding import batch_rows, local_rows, local_shards
from lockstep.integrations.transformers import examples
from lockstep.integrations.transformers.examples import Division, division_of, row_counts

_IGNORED = -100  # the label of what has no loss, in transformers as in torch's cross-entropy

Items = Literal["labels", "shifted labels", "rows"]
"""What a mean loss averages: class numbers, those but for the first of each row, or rows."""


def _count_items(inputs: Mapping[str, Any], rows: int, *, items: Items) -> int:
    """The number of values that a mean loss is over: labels that count, or rows if labels are not class numbers."""
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and items == "shifted labels" and labels.ndim > 1:
            labels = labels[..., 1:]
    if items == "rows" or not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return rows
    return int(labels.ne(_IGNORED).sum())


@dataclass(frozen=True, kw_only=True)
class Shard(WithRows):
    """One replica's shard of a batch."""

    inputs: Any  # a mapping of the batch's type: the model's inputs, on the device where the batch was collated
    rows: int  # the number of examples; may be 0
    count: int  # the number of values that a mean loss of the shard is over
    total: int  # the number of values that a mean loss of the whole batch is over
    division: Division | None = None  # of the whole batch, where a row is not an example


def divided(
    batch: Mapping[str, Any], workers: Communicator, list_reader: ListReader, *, items: Items
) -> PerReplica[Shard]:
    """The shards of this worker's replicas: views of the whole collated batch, which is equal on all workers.

    ``list_reader`` finds the lists of one item per example, such as texts or boxes; ``items`` is what a mean loss
    averages. With one replica in all the batch is the shard, whatever its rows are. Otherwise a DataError is raised if
    the tensors disagree in length.
    """
    plain, division = division_of(batch)
    if division is not None:
        return _by_example(division, workers, items=items)
    if sum(workers.replicas) == 1:
        rows = max(row_counts(plain), default=1)
        count = _count_items(plain, rows, items=items)
        return PerReplica([Shard(inputs=plain, rows=rows, count=count, total=count)])
    marked = list_reader.marked(plain)
    rows = batch_rows(marked)
    cut = local_rows(rows, workers)
    local = local_shards(marked, lambda _: cut, list_reader)
    total = _count_items(marked, rows, items=items)
    shards = []
    for replica, size in enumerate(cut.sizes):
        inputs = select(local, replica, len(cut.sizes))
        count = _count_items(inputs, size, items=items)
        shards.append(Shard(inputs=inputs, rows=size, count=count, total=total))
    return PerReplica(shards)


def stand_in(batch: Mapping[str, Any], list_reader: ListReader) -> Shard:
    """What a replica without rows computes where all must call the same collectives: an example that counts nothing."""
    plain, division = division_of(batch)
    if division is not None:
        inputs: Any = dict(division.parts[0] or {})
    else:
        rows = batch_rows(list_reader.marked(plain))
        inputs = divided(plain, SingleWorkerCommunicator(rows), list_reader, items="rows").values[0].inputs
    return Shard(inputs=inputs, rows=0, count=0, total=1)


def _by_example(division: Division, workers: Communicator, *, items: Items) -> PerReplica[Shard]:
    """The shards of this worker's replicas, of a batch that was divided by example as it was collated."""
    parts = list(zip(division.parts, division.sizes, strict=True))
    counts = [_count_items(inputs or {}, size, items=items) if size else 0 for inputs, size in parts]
    first = workers.first_replica
    local = slice(first, first + workers.replicas[workers.index])
    shards = zip(parts[local], counts[local], strict=True)
    return PerReplica(
        [
            Shard(inputs=dict(inputs or {}), rows=size, count=count, total=sum(counts), division=division)
            for (inputs, size), count in shards
        ]
    )


def halves(shard: Shard, *, items: Items) -> PerReplica[Shard]:
    """A shard divided among two replicas, as a batch is."""
    order = None if shard.division is None else shard.division.order
    if order is None:
        return divided(shard.inputs, SingleWorkerCommunicator(2), ListReader(records_are_rows=True), items=items)
    parts = examples.halves(shard.inputs, shard.rows, order)
    division = Division(examples=shard.rows, parts=parts, order=order)
    return _by_example(division, SingleWorkerCommunicator(2), items=items)


class Prediction(NamedTuple):
    """One replica's outputs for its shard of at least one row."""

    rows: int  # the number of examples
    items: float  # the number of values that the loss is a mean over
    loss: Tensor | None  # the mean, a 0-dim tensor; None without labels
    logits: Any  # nested tuples or dicts of tensors, [rows, ...] each; None if only the loss was asked for
    labels: Any  # likewise


def joined(
    parts: Sequence[Prediction | None],
    workers: Communicator,
    device: torch.device,
    division: Division | None = None,
) -> tuple[Tensor | None, Any, Any]:
    """Loss, logits and labels of the whole batch, on ``device``. Every worker must call it.

    ``parts`` are the predictions of the local replicas, in replica order; None for a shard without rows. ``division``
    is that of the batch, where a row is not an example.
    """
    local = [tuple(part) for part in parts if part is not None]
    gathered = all_gather_object(workers, "the outputs for a batch", local)
    predictions = [Prediction(*part) for worker in gathered for part in worker]
    rows = [part.rows for part in predictions]
    return (
        _mean_loss(predictions, device),
        _joined([part.logits for part in predictions], rows, device, division),
        _joined([part.labels for part in predictions], rows, device, division),
    )


def _mean_loss(parts: Sequence[Prediction], device: torch.device) -> Tensor | None:
    losses = [(part.loss.to(device), part.items) for part in parts if part.loss is not None]
    if not losses:
        return None
    total = sum(items for _, items in losses)
    if not total:  # NaN, which transformers leaves out of the mean over batches
        return losses[0][0]
    weighed = torch.stack([loss.double() * (items / total) for loss, items in losses if items])
    return weighed.sum().to(losses[0][0].dtype)


def _joined(structures: Sequence[Any], rows: Sequence[int], device: torch.device, division: Division | None) -> Any:
    """Joins structures leaf by leaf. A tensor without rows, such as a second loss, is averaged over rows."""
    flat = [tree_flatten(structure) for structure in structures]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_joined_leaf(column, rows, device, division) for column in columns], flat[0][1])


def _joined_leaf(values: Sequence[Any], rows: Sequence[int], device: torch.device, division: Division | None) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    values_on_device = [value.to(device) for value in values]
    if values_on_device[0].ndim:
        return examples.joined(values_on_device, rows, division)
    return sum(value * (count / sum(rows)) for value, count in zip(values_on_device, rows, strict=True))
