"""torchmetrics on replicas: each replica updates its own copy of a metric, and the states are merged, never averaged.

Also: saving and restoring states in the middle of an epoch, on any number of replicas, and a check of the user's own
metrics in the first step. ``mirroring.metric_merging`` merges the states.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep._torch_compat import tree_leaves
from lockstep.collectives.communicator import all_gather_object
from lockstep.errors import CollectiveError, ConfigError
from lockstep.extras import require
from lockstep.mirroring.metric import check_kind, leave_unsynced, merge_into, merge_metrics, nested_metrics, states_of
from lockstep.parallel.vocab_parallel import gather_logits, has_sharded_logits
from lockstep.replicas.context import ReplicaContext
from lockstep.replicas.device.async_scalars import AsyncScalars
from lockstep.strategies.base import Strategy
from lockstep.train.batch import ShardRows, checked_alone
from lockstep.train.string_identifiers import logits_of, takes_tensors
from lockstep.train.summed_metric import SummedMetric
from lockstep.watch.loss_parts import FAILURES

CERTAIN = 1e-3
"""A larger relative difference is no rounding."""
_ADDITIVE = ("torchmetrics.", "lockstep.")
"""Packages whose metrics add up sums and counts, or keep all rows."""
LEAST_ROWS = 3
"""Fewer rows cannot be divided into parts of different sizes, whose means have different weights."""


def check_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics given to ``compile`` as a dict of name to torchmetrics Metric, or a ConfigError."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics is a {type(metrics).__name__}; give a dict of name to torchmetrics Metric, such as "
            "{'accuracy': MulticlassAccuracy(num_classes=10)}, or a list such as ['accuracy']"
        )
    torchmetrics = sys.modules.get("torchmetrics")  # else nobody can have made one of its metrics
    kinds = (SummedMetric,) if torchmetrics is None else (SummedMetric, torchmetrics.Metric)
    for name, metric in metrics.items():
        if not isinstance(metric, kinds):
            kind = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ConfigError(f"metric {name!r} is {kind}; give an instance of a torchmetrics Metric")
        if not isinstance(name, str) or name == "loss":
            raise ConfigError(f"a metric is named {name!r}; choose a string other than 'loss', which the logs have")
    return dict(metrics)


class ReplicaMetrics:
    """The metrics of one pass: a copy of each on every replica, and the merged values.

    ``metrics`` are the user's, by name; they are copied and never updated. ``per_replica`` are each replica's own.
    Raises a UsageError if the states of one cannot be merged, and there are several replicas.
    """

    def __init__(self, strategy: Strategy, metrics: Mapping[str, Any]) -> None:
        self._workers, self._home = strategy.workers, strategy.devices[0]
        self._computing_alike = strategy.computing_alike
        if self._workers.num_replicas > 1:
            for metric in metrics.values():
                check_kind(metric)
        self._checks_inputs = self._home.kind != "CPU"
        self.per_replica = [
            {name: _fresh_copy(metric, device.torch_device) for name, metric in metrics.items()}
            for device in strategy.devices
        ]

    def skip_input_checks(self) -> None:
        """After the first batch on a GPU, switches off the metrics' checks of inputs, which make the host wait."""
        if self._checks_inputs:
            self._checks_inputs = False
            for metric in self._all():
                for part in nested_metrics(metric):
                    if getattr(part, "validate_args", False):
                        part.validate_args = False

    def reset(self) -> None:
        for metric in self._all():
            metric.reset()

    def _all(self) -> Iterator[Any]:
        return chain.from_iterable(replica_metrics.values() for replica_metrics in self.per_replica)

    def compute(self) -> dict[str, float]:
        """The values over the rows of all replicas, by name. Every worker must call it, outside the replicas."""
        names, values = self.begin_compute()
        return dict(zip(names, values.read(), strict=True))

    def begin_compute(self) -> tuple[list[str], AsyncScalars]:
        """``compute`` without waiting for a GPU: the names, and the values that can be read later."""
        values: dict[str, Any] = {}
        for name in self.per_replica[0]:
            local = [replica_metrics[name] for replica_metrics in self.per_replica]
            gathered = all_gather_object(self._workers, f"metric {name!r}", [states_of(metric) for metric in local])
            states = [state for worker in gathered for state in worker]
            alone = self._workers.is_single and len(local) == 1
            merged = local[0] if alone else merge_metrics(local, states)
            # With replicas=, with as many threads as a replica has: their number decides how torch rounds a sum.
            with self._computing_alike():
                values.update(_single_numbers(name, merged.compute()))
        return list(values), AsyncScalars(list(values.values()), self._home)


def update_metric(metric: Any, outputs: Any, targets: Any) -> None:
    """Updates a metric; one of torchmetrics with the logits of outputs that have them."""
    metric.update(logits_of(outputs) if takes_tensors(metric) else outputs, targets)


def gather_states(metric: Any) -> None:
    """Gathers vocabulary-sharded logits among a metric's states. Every worker that holds a shard must call it."""
    for part in nested_metrics(metric):
        for name, state in part.metric_state.items():
            if has_sharded_logits(state):
                setattr(part, name, gather_logits(state))


def _fresh_copy(metric: Any, device: torch.device) -> Any:
    fresh = copy.deepcopy(metric).to(device)
    fresh.reset()
    leave_unsynced(fresh)
    return fresh


def _single_numbers(name: str, value: Any) -> dict[str, Any]:
    """The logs of one computed value: itself, or one per entry if it is a dict."""
    if isinstance(value, Mapping):
        numbers = {key: _single_numbers(name, item).values() for key, item in value.items()}
        return {f"{name}_{key}": number for key, values in numbers.items() for number in values}
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"metric {name!r} computed a tensor of shape {tuple(value.shape)}; the logs hold single numbers: "
            "choose an average, or wrap it in torchmetrics' ClasswiseWrapper"
        )
    return {name: value}


def load_states(
    metrics: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], *, first: int, replicas: int
) -> None:
    """Restores saved states into the local replicas' metrics, which have been reset.

    On another number of replicas, the states of replica r go to replica r modulo the new number. Where several meet
    they are merged, which is exact for states that are summed, joined, or extremes.

    ``saved`` are the ``replica_states`` of all replicas that saved, ``first`` is the number of the first local replica
    and ``replicas`` how many there are now, over all workers.
    """
    for local, replica_metrics in enumerate(metrics):
        sources = saved[first + local :: replicas]
        for name, metric in replica_metrics.items():
            states = zip(*[source[name] for source in sources if name in source], strict=True)
            for part, saved_states in zip(nested_metrics(metric), states, strict=False):
                updated_states = [state for state in saved_states if state["updates"]]
                if len(updated_states) < 2 or _combines(part):
                    merge_into(part, updated_states)
                    continue
                warnings.warn(
                    f"metric {name!r} cannot combine the states of several replicas; on this smaller number of "
                    "replicas it counts only the rest of the epoch",
                    stacklevel=2,
                )


def replica_states(metrics: dict[str, Any]) -> dict[str, Any]:
    """The states of one replica's metrics, by name."""
    return {name: states_of(metric) for name, metric in metrics.items()}


def _combines(part: Any) -> bool:
    """Whether states of the metric can be combined exactly: the mean of means is not the mean."""
    if isinstance(part, SummedMetric):
        return True
    data = require("torchmetrics.utilities.data", "train")
    exact = (data.dim_zero_sum, data.dim_zero_cat, data.dim_zero_max, data.dim_zero_min)
    return all(reduction in exact for reduction in part._reductions.values())


def check_metrics_additive(metrics: Mapping[str, Any], shard: ShardRows, context: ReplicaContext) -> None:
    """Refuses metrics that give another value for a shard of ``LEAST_ROWS`` or more in two merged updates than in one.

    A metric that adds up means would give other numbers on another number of replicas. Those of ``_ADDITIVE`` do not.
    """
    for name, metric in metrics.items():
        if any(not type(part).__module__.startswith(_ADDITIVE) for part in nested_metrics(metric)):
            try:
                with torch.no_grad(), checked_alone(context):
                    values = _compared(metric, shard)
            except (CollectiveError, *FAILURES):  # it cannot be computed from some of the rows
                continue
            if values is not None:
                raise ConfigError(
                    f"metric {name!r}, a {type(metric).__name__}, gives {values[0]:.6g} for all rows of a shard and "
                    f"{values[1]:.6g} for the same rows in two updates, so it depends on the number of replicas; add "
                    'up sums and counts in update, with dist_reduce_fx="sum", and divide in compute'
                )


def _compared(metric: Any, shard: ShardRows) -> tuple[float, float] | None:
    """The values for all rows and for their parts, if they differ."""
    index = shard.index()
    if index is None:
        return None
    cut = max(1, shard.rows // 3)
    whole, again = (_value(_updated(metric, shard)) for _ in range(2))
    halves = [_updated(metric, shard.take(part)) for part in (index[:cut], index[cut:])]
    parts = _value(merge_metrics(halves, [states_of(half) for half in halves]))
    if len(whole) != len(parts) or whole != again:  # it keeps all rows, or draws random numbers
        return None
    for value, other in zip(whole, parts, strict=True):
        if (
            math.isfinite(value)
            and math.isfinite(other)
            and not math.isclose(value, other, rel_tol=CERTAIN, abs_tol=1e-6)
        ):
            return value, other
    return None


def _updated(metric: Any, shard: ShardRows) -> Any:
    fresh = _fresh_copy(metric, metric.device)
    update_metric(fresh, shard.outputs, shard.batch.y)
    return fresh


def _value(metric: Any) -> list[float]:
    leaves = map(torch.as_tensor, tree_leaves(metric.compute()))
    return [float(number) for leaf in leaves for number in leaf.flatten().tolist()]
