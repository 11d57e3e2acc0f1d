"""Losses of shards that add up to the loss of the whole batch.

    shard:  the mean that Keras computes = total of the shard / count of the shard
    ours:   the same, times  (count of the shard / count of all) / (rows of the shard / rows of all)

So the mean of the shards' losses, weighted by their rows, is Keras's loss of the whole batch, also where masks, weights
or ragged targets give shards other counts than rows. Where the counts are the rows the factor is 1. Whatever else a
program computes as a mean over rows, such as regularisation of activities, has that property without a factor. A number
that a program gives to ``keras.metrics.Mean`` without a weight is such a mean, and is weighted by its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.losses import loss as keras_losses
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One replica's part of a batch, and how to add a number over all parts.

    Args:
        rows: of this shard.
        all_rows: of the whole batch.
        add: sums a tensor without a dimension over all replicas; every replica calls it.
    """

    rows: int
    all_rows: int
    add: Callable[[Tensor], Tensor]

    @property
    def share(self) -> float:
        """The weight of this shard's means in those of the batch."""
        return self.rows / self.all_rows


current_shard: ContextVar[Shard | None] = ContextVar("lockstep_keras_shard", default=None)
"""The shard that a replica computes the loss of; None elsewhere."""
is_compared: ContextVar[bool] = ContextVar("lockstep_keras_is_compared", default=False)
"""Whether the results of shards are compared with those of the whole batch: rows must not depend on each other."""


@contextmanager
def losses_of_shard(shard: Shard) -> Iterator[None]:
    """A block in which Keras's losses are those of one shard of a batch."""
    token = current_shard.set(shard)
    try:
        yield
    finally:
        current_shard.reset(token)


def of_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``reduce_weighted_values`` of Keras: in a replica a loss is that of the current shard."""

    @wraps(original)
    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        shard = current_shard.get()
        values = keras.ops.convert_to_tensor(values)
        if shard is None or reduction in (None, "none") or values.dim() == 0:
            return loss
        if reduction == "sum":
            # The step multiplies the loss of the shard by its share, which is for means.
            return loss / shard.share if shard.rows else loss
        # A replica without rows computes with a row of another one, which is counted there.
        count = _count(values, sample_weight, mask, reduction) * (shard.rows > 0)
        total = shard.add(count)
        # Integers up to 2**53 are exact here, so that equal counts give a factor of exactly 1.
        factor = torch.where(total > 0, (count * shard.all_rows) / (total * max(shard.rows, 1)), 1.0)
        return loss * factor.to(loss.dtype)

    return reduce


def _count(values: Tensor, sample_weight: Any, mask: Any, reduction: str) -> Tensor:
    """What Keras divides the sum of a shard's values by, in double precision."""
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = keras_losses.apply_mask(sample_weight, mask, dtype="float32", reduction=reduction)
        _, weights = keras_losses.squeeze_or_expand_to_same_rank(values, weights)
        return torch.sum(weights, dtype=torch.float64)
    count = torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    if mask is not None and mask.numel():
        count = count * torch.sum(mask.to(torch.float64)) / mask.numel()
    return count


def of_means(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``Mean.update_state`` of Keras: the mean of a shard counts by its share of the batch."""

    @wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> None:
        shard = current_shard.get()
        if shard is not None and sample_weight is None and keras.ops.ndim(values) == 0:
            sample_weight = shard.share
        original(self, values, sample_weight=sample_weight)

    return update_state


def of_masks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``apply_mask`` of Keras, which multiplies weights in place: it gets a copy, and metrics the original."""

    @wraps(original)
    def apply(sample_weight: Any, *args: Any, **kwargs: Any) -> Any:
        if current_shard.get() is not None and isinstance(sample_weight, Tensor):
            sample_weight = sample_weight.clone()
        return original(sample_weight, *args, **kwargs)

    return apply


def ids_of_scope(layer: Any) -> set[int]:
    """Returns the ids of the losses that a layer has added, by which Keras tells whose a loss is; in a scope, its own.

    Keras keeps one set for each layer. Replicas would share it, and once the losses are gone, others get their ids
    (test_a_loss_counts_once_where_another_layer_has_one_with_its_id_in_another_replica).
    """
    scope = get_stateless_scope()
    if scope is None:
        ids: set[int] = layer.__dict__.setdefault("_loss_ids", set())
        return ids
    of_layers: dict[Any, set[int]] = scope.__dict__.setdefault("_lockstep_loss_ids", {})
    return of_layers.setdefault(layer, set())
