"""The states of one torchmetrics metric on several replicas, made those of one metric.

Each state is reduced with the function that the metric itself registered for it (sum, mean, max, min, cat, its own, or
none: stacked), as torchmetrics' synchronisation between processes does. A replica that saw no row takes no part, so it
cannot pull a mean. Nothing here knows where the states come from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.extras import require

Reduction = Callable[[Any], Any]


def states_of(metric: Any) -> list[dict[str, Any]]:
    """The states of a metric, and of all metrics inside it, with how often each was updated."""
    return [{"states": part.metric_state, "updates": part.update_count} for part in nested_metrics(metric)]


def merge_metrics(local: Sequence[Any], states: Sequence[list[dict[str, Any]]]) -> Any:
    """One metric with the states of all replicas; the replicas' own metrics stay as they are.

    Args:
        local: the same metric on each local replica, in replica order.
        states: ``states_of`` it on each replica of all workers, in replica order.
    """
    base = next((metric for metric in local if any(part["updates"] for part in states_of(metric))), local[0])
    merged = _copy_sharing_states(base)
    for part, sources in zip(nested_metrics(merged), zip(*states, strict=True), strict=True):
        _merge_into(part, [source for source in sources if source["updates"]])
    return merged


def merge_states(states: Sequence[Any], reduction: Reduction | None) -> Any:
    """One state of a metric, given its value on every replica and the metric's own reduction.

    Lists are joined in replica order and tensors stacked along a new first dimension; then the reduction is applied.
    """
    if isinstance(states[0], list):
        joined = [item for state in states for item in state]
        return reduction(joined) if joined and reduction is not None else joined
    stacked = torch.stack(list(states))
    return stacked if reduction is None else reduction(stacked)


def nested_metrics(metric: Any) -> list[Any]:
    """The metric and all metrics inside it, such as the two of a sum or the one of a wrapper."""
    metric_class = require("torchmetrics", "train").Metric
    return [module for module in metric.modules() if isinstance(module, metric_class)]


def _merge_into(part: Any, sources: Sequence[Any]) -> None:
    updates = [source["updates"] for source in sources]
    in_turn = all(
        len(source["states"][name]) % source["updates"] == 0
        for source in sources
        for name in part._reductions
        if isinstance(source["states"][name], list)
    )
    for name, reduction in part._reductions.items():
        states = [_to_device(source["states"][name], part.device) for source in sources]
        if in_turn and len(states) > 1 and isinstance(states[0], list):
            states = [_by_update(states, updates), []]
        if states:
            setattr(part, name, states[0] if len(states) == 1 else merge_states(states, reduction))
    part._update_count = sum(updates)
    part._computed = None


def _by_update(lists: Sequence[list[Any]], updates: Sequence[int]) -> list[Any]:
    """What all replicas' first updates added, then their second, ...: in the order in which one device has the rows.

    Every update of a replica has added as many items, so all states of a metric are put into the same order.
    """
    each = [len(items) // count for items, count in zip(lists, updates, strict=True)]
    return [
        item
        for update in range(max(updates))
        for items, size in zip(lists, each, strict=True)
        for item in items[update * size : (update + 1) * size]
    ]


def _copy_sharing_states(metric: Any) -> Any:
    """A deep copy whose state tensors are the original's: states can be large, and they are replaced, not written."""
    states = (state for part in nested_metrics(metric) for state in part.metric_state.values())
    tensors = [tensor for state in states for tensor in (state if isinstance(state, list) else [state])]
    return copy.deepcopy(metric, {id(tensor): tensor for tensor in tensors})


def _to_device(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_to_device(item, device) for item in state]
    return state.to(device) if isinstance(state, Tensor) else state
