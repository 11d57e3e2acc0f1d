"""Loss helpers for custom loops: they turn the per-example losses of a shard into its part of the global average.

The results, and their gradients, add up over replicas to those of the global batch, also for uneven shards. Where
something other than examples is counted, such as labels that are not ignored, divide by their number in the batch:

    loss = F.cross_entropy(logits, labels, reduction="sum") / context.all_reduce("sum", (labels != -100).sum())
"""

from __future__ import annotations

import sys
from functools import partial
from numbers import Real

import torch

from lockstep.checks import check_kind, check_number
from lockstep.collectives.communicator import Communicator
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import in_cross_replica_context

_NAME = "compute_average_loss"


def compute_average_loss(
    per_example_loss: torch.Tensor, *, sample_weight: torch.Tensor | None = None, global_batch_size: int | None = None
) -> torch.Tensor:
    """The sum of this shard's losses over the global batch size. Inside a replica; outside a scope, one device's mean.

    Args:
        per_example_loss: [rows, ...], not reduced; 0 rows give 0.
        sample_weight: [rows], or what broadcasts to the losses and multiplies them; the divisor stays the examples.
        global_batch_size: examples in the whole global batch. None adds up the rows of all replicas, and then every
            replica must call it.

    Returns:
        A scalar; the sum over all replicas is the average loss of the global batch.

    Raises:
        ConfigError: a loss that has been reduced already, weights that do not fit, or a size that is not positive.
        UsageError: called in cross-replica context.

    Example:
        >>> import torch, lockstep as ls
        >>> float(ls.compute_average_loss(torch.tensor([1.0, 2.0]), global_batch_size=4))
        0.75
    """
    context = get_replica_context()
    if context is None and in_cross_replica_context():
        raise UsageError(
            "compute_average_loss is about one replica's shard; call it inside the function given to strategy.run"
        )
    for name, value in (("per_example_loss", per_example_loss), ("sample_weight", sample_weight)):
        check_kind(name, value, torch.Tensor, "a tensor")
    if per_example_loss is None or per_example_loss.ndim == 0:
        raise ConfigError(
            'the loss is a scalar, expected one value per example, shape (rows, ...); use reduction="none" in the loss'
        )
    if sample_weight is not None:
        per_example_loss = per_example_loss * fitted_weight(sample_weight, per_example_loss)
    total = per_example_loss.sum()
    if global_batch_size is not None:
        check_number("global_batch_size", global_batch_size, least=1, most=sys.maxsize, whole=True)
        return total / global_batch_size
    rows: int = per_example_loss.shape[0]
    if context is not None and context.num_replicas_in_sync > 1:
        rows = context.meet(_NAME, rows, partial(_rows_of_all, context.workers))
    # An empty global batch has a loss of 0 and not NaN.
    return total / max(rows, 1)


def scale_regularization_loss(loss: torch.Tensor | float) -> torch.Tensor:
    """The loss, a tensor that is summed or a number, over the replicas, each of which adds all: it counts once.

    Raises UsageError in cross-replica context.
    """
    check_kind("loss", loss, (torch.Tensor, Real), "a tensor or a number", optional=False)
    loss = torch.as_tensor(loss, dtype=None if isinstance(loss, torch.Tensor) else torch.get_default_dtype())
    context = get_replica_context()
    if context is not None:
        return loss.sum() / context.num_replicas_in_sync
    if in_cross_replica_context():
        raise UsageError("scale_regularization_loss belongs inside the function given to strategy.run")
    return loss.sum()


def _rows_of_all(workers: Communicator, rows: list[int]) -> int:
    return int(workers.sum_numbers(_NAME, [[count] for count in rows])[0])


def fitted_weight(weight: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """The weight with the dimensions of the losses, to multiply them: [rows, 1] for [rows] beside [rows, tokens].

    One weight per column needs all dimensions: a shard may have as many rows as the losses have columns.
    """
    if not weight.ndim:
        return weight
    shape = list(weight.shape)
    while len(shape) > losses.ndim and shape[-1] == 1:
        shape.pop()
    # A weight of [rows, 1] beside losses of [rows] has left the loop above as [rows].
    by_row = len(shape) < losses.ndim or losses.ndim == 1
    shape += [1] * (losses.ndim - len(shape))
    fits = len(shape) == losses.ndim and all(
        size in (1, other) for size, other in zip(shape, losses.shape, strict=True)
    )
    if not fits or (by_row and shape[0] != losses.shape[0]):
        raise ConfigError(
            f"sample_weight has shape {tuple(weight.shape)}, but the losses have {tuple(losses.shape)}; "
            f"give one weight per example, shape ({losses.shape[0]},), or one of {losses.ndim} dimensions"
        )
    return weight.reshape(shape)
