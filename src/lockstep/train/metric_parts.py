"""Whether a metric of the user's own may be updated in shards: compared in the first step with its update in parts.

    update(all rows) -> compute()   must be   update(some rows), update(the others) -> merged -> compute()

A metric that adds up means gives other numbers for another number of replicas, and is refused. Those of torchmetrics
add up sums and counts, or keep all rows, and are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.errors import CollectiveError, ConfigError
from lockstep.mirroring.metric_merging import merge_metrics, nested_metrics, states_of
from lockstep.replicas.context import ReplicaContext, in_context
from lockstep.train.metrics import fresh_copy
from lockstep.train.rows import Rows, random_numbers_apart

CERTAIN = 1e-3
"""A larger difference, relative to the value, is none of rounding."""
LEAST_ROWS = 3
"""Fewer cannot be divided into parts of different sizes, whose means have different weights."""
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError)


def check_metrics_in_parts(metrics: Mapping[str, Any], shard: Rows, context: ReplicaContext) -> None:
    """Looks at the metrics that are not torchmetrics' own.

    Args:
        metrics: by name; copies of them are updated.
        shard: without gradients, of at least ``LEAST_ROWS`` rows.
        context: the replica's.

    Raises:
        ConfigError: a metric gives another value for the rows in parts.
    """
    for name, metric in metrics.items():
        if any(not type(part).__module__.startswith("torchmetrics.") for part in nested_metrics(metric)):
            try:
                with torch.no_grad(), random_numbers_apart(context), in_context(context.alone()):
                    values = _compared(metric, shard)
            except (CollectiveError, *_FAILURES):  # it cannot be computed from some of the rows
                continue
            if values is not None:
                raise ConfigError(
                    f"metric {name!r}, a {type(metric).__name__}, gives {values[0]:.6g} for all rows of a shard and "
                    f"{values[1]:.6g} for the same rows in two updates, so that it would give another value on another "
                    "number of replicas; add up sums and counts in update (self.total += values.sum(), self.count += "
                    'values.numel(), both with dist_reduce_fx="sum"), and divide in compute'
                )


def _compared(metric: Any, shard: Rows) -> tuple[float, float] | None:
    """The value of all rows and that of their parts, where these differ."""
    index = shard.index()
    if index is None:
        return None
    cut = max(1, shard.rows // 3)
    whole, again = (_value(_updated(metric, shard)) for _ in range(2))
    halves = [_updated(metric, shard.take(part)) for part in (index[:cut], index[cut:])]
    parts = _value(merge_metrics(halves, [states_of(half) for half in halves]))
    if len(whole) != len(parts) or whole != again:  # it keeps all rows, or draws random numbers
        return None
    for own, other in zip(whole, parts, strict=True):
        if math.isfinite(own) and math.isfinite(other) and not math.isclose(own, other, rel_tol=CERTAIN, abs_tol=1e-6):
            return own, other
    return None


def _updated(metric: Any, shard: Rows) -> Any:
    fresh = fresh_copy(metric, metric.device)
    fresh.update(shard.outputs, shard.batch.y)
    return fresh


def _value(metric: Any) -> list[float]:
    leaves = tree_leaves(metric.compute())
    return [
        number for leaf in leaves for number in (leaf.flatten().tolist() if isinstance(leaf, Tensor) else [float(leaf)])
    ]
