"""The states of metrics in the middle of an epoch, given back after a restart, on any number of replicas.

On the same layout each replica gets its own back. On another one the states of replica r go to replica r modulo the new
number; where several meet they are combined, which is exact for metrics whose states are summed, joined, or extremes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.extras import require
from lockstep.mirroring.metric_merging import merge_states, nested_metrics, states_of


def load_states(
    metrics: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], *, first: int, replicas: int
) -> None:
    """Gives the local replicas' metrics the states that were saved.

    Args:
        metrics: each local replica's own metrics, by name, as they are after a reset.
        saved: ``replica_states`` of each replica of all workers that saved.
        first: the number of the first local replica among those of all workers.
        replicas: how many replicas all workers have now.
    """
    for local, own in enumerate(metrics):
        sources = saved[first + local :: replicas]
        for name, metric in own.items():
            parts = [source[name] for source in sources if name in source]
            if parts:
                _load(name, metric, parts)


def replica_states(metrics: dict[str, Any]) -> dict[str, Any]:
    """The states of one replica's metrics, by name."""
    return {name: states_of(metric) for name, metric in metrics.items()}


def _load(name: str, metric: Any, sources: Sequence[list[dict[str, Any]]]) -> None:
    for part, states in zip(nested_metrics(metric), zip(*sources, strict=True), strict=True):
        used = [state for state in states if state["updates"]]
        if len(used) > 1 and not _combines(part):
            warnings.warn(
                f"metric {name!r} cannot combine what several replicas had counted; on this smaller number of replicas "
                "it counts this epoch from here on",
                stacklevel=2,
            )
            continue
        for key, reduction in part._reductions.items():
            values = [state["states"][key] for state in used]
            if values:
                setattr(part, key, _moved(_combined(values, reduction), part.device))
        part._update_count = sum(state["updates"] for state in used)
        part._computed = None


def _combined(values: Sequence[Any], reduction: Any) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    return values[0] if len(values) == 1 else merge_states(values, reduction)


def _combines(part: Any) -> bool:
    """Whether states of the metric can be combined in steps: the mean of means is not the mean."""
    data = require("torchmetrics.utilities.data", "train")
    exact = (data.dim_zero_sum, data.dim_zero_cat, data.dim_zero_max, data.dim_zero_min)
    return all(reduction in exact for reduction in part._reductions.values())


def _moved(state: Any, device: Any) -> Any:
    if isinstance(state, list):
        return [_moved(item, device) for item in state]
    return state.to(device) if isinstance(state, Tensor) else state
