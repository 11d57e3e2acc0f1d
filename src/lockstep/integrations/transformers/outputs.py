"""What the replicas of all workers found for their shards of an evaluation batch, put together for every worker.

Outputs are joined along dim 0, in the order of the batch. The loss is that of the whole batch: the shards' means, each
weighed by what it was over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.collectives.communicator import Workers, exchange_values


class Prediction(NamedTuple):
    """What one replica found for its shard of at least one row.

    Args:
        rows: how many examples it had.
        items: how many values the loss is a mean over.
        loss: the mean, a tensor without a dimension; None without labels.
        logits: nested tuples or dicts of tensors, [rows, ...] each; None where only the loss was asked for.
        labels: likewise.
    """

    rows: int
    items: float
    loss: Tensor | None
    logits: Any
    labels: Any


def joined(
    parts: Sequence[Prediction | None], workers: Workers, device: torch.device
) -> tuple[Tensor | None, Any, Any]:
    """Loss, logits and labels of the whole batch, on ``device``. Every worker must call it.

    Args:
        parts: those of the local replicas, in replica order; None for a shard of no rows.
        workers: all workers.
        device: where transformers expects them.
    """
    local = [tuple(part) for part in parts if part is not None]
    met = exchange_values(workers, "the outputs for a batch", local)
    found = [Prediction(*part) for worker in met for part in worker]
    rows = [part.rows for part in found]
    return (
        _mean_loss(found, device),
        _joined([part.logits for part in found], rows, device),
        _joined([part.labels for part in found], rows, device),
    )


def _mean_loss(parts: Sequence[Prediction], device: torch.device) -> Tensor | None:
    losses = [(part.loss.to(device), part.items) for part in parts if part.loss is not None]
    if not losses:
        return None
    total = sum(items for _, items in losses)
    if not total:  # a mean of nothing is NaN, which transformers leaves out of the mean over batches
        return losses[0][0]
    weighed = torch.stack([loss.double() * (items / total) for loss, items in losses if items])
    return weighed.sum().to(losses[0][0].dtype)


def _joined(structures: Sequence[Any], rows: Sequence[int], device: torch.device) -> Any:
    """One structure of the parts' structures; a tensor without rows, such as a second loss, is averaged over rows."""
    flat = [tree_flatten(structure) for structure in structures]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_joined_leaf(column, rows, device) for column in columns], flat[0][1])


def _joined_leaf(values: Sequence[Any], rows: Sequence[int], device: torch.device) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    here = [value.to(device) for value in values]
    if here[0].ndim:
        return torch.cat(here)
    return sum(value * (count / sum(rows)) for value, count in zip(here, rows, strict=True))
