"""torchmetrics on replicas: one copy of each metric per replica, merged exactly, never averaged.

Each replica updates its own deep copy on its own device. Reading gathers the states of all replicas and reduces each
with the function that the metric itself registered for it (sum, mean, max, min, cat, its own, or none: stacked), as
torchmetrics' synchronisation between processes does. A replica that saw no row takes no part, so it cannot pull a mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.collectives.values import exchange_values
from lockstep.collectives.workers import Workers
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.parallel.scores import gathered, holds_divided
from lockstep.replicas.arriving import Arriving
from lockstep.strategies.base import Strategy

Reduction = Callable[[Any], Any]


def check_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics given to ``compile`` as a dict of name to torchmetrics Metric.

    Raises:
        ConfigError: something that is no dict, no metric, or a metric named "loss".
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics is a {type(metrics).__name__}; give a dict of name to torchmetrics Metric, such as "
            "{'accuracy': MulticlassAccuracy(num_classes=10)}"
        )
    if metrics:
        metric_class = require("torchmetrics", "text").Metric
        for name, metric in metrics.items():
            _check_metric(name, metric, metric_class)
    return dict(metrics)


def _check_metric(name: Any, metric: Any, metric_class: type) -> None:
    if not isinstance(metric, metric_class):
        kind = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
        raise ConfigError(f"metric {name!r} is {kind}; give an instance of a torchmetrics Metric")
    if not isinstance(name, str) or name == "loss":
        raise ConfigError(f"a metric is named {name!r}; choose a text other than 'loss', which the logs have already")


class ReplicaMetrics:
    """The metrics of one pass: a copy of each on every replica, and the merged values.

    Args:
        metrics: name to torchmetrics Metric, as the user gave them; they are copied and never updated.
        devices: the torch device of each local replica, in replica order.
        workers: over whose replicas the values are.
        home: the first replica's device, where values may be read late; None reads them at once.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        devices: Sequence[torch.device],
        workers: Workers,
        home: LogicalDevice | None = None,
    ) -> None:
        self._workers = workers
        self._home = home
        self._checked = home is None or home.kind == "CPU" or not metrics
        self._copies = [{name: fresh_copy(metric, device) for name, metric in metrics.items()} for device in devices]

    @classmethod
    def on(cls, strategy: Strategy, metrics: Mapping[str, Any]) -> Self:
        """The metrics on all replicas of a strategy."""
        devices = strategy.devices
        return cls(metrics, [device.torch_device for device in devices], strategy.workers, devices[0])

    @property
    def per_replica(self) -> list[dict[str, Any]]:
        """Each replica's own metrics, by name."""
        return self._copies

    def trust_inputs(self) -> None:
        """After a batch: on a GPU, where the host waits for each of them, no metric checks its inputs any more."""
        if self._checked:
            return
        self._checked = True
        for part in (part for copies in self._copies for metric in copies.values() for part in nested_metrics(metric)):
            if getattr(part, "validate_args", False):
                part.validate_args = False

    def reset(self) -> None:
        """Forgets all updates."""
        for copies in self._copies:
            for metric in copies.values():
                metric.reset()

    def compute(self) -> dict[str, float]:
        """The values over the rows of all replicas, by name. Between steps, outside replicas, on every worker."""
        names, values = self.begin_compute()
        return dict(zip(names, values.read(), strict=True))

    def begin_compute(self) -> tuple[list[str], Arriving]:
        """``compute`` without a wait for what a GPU has to compute: the names, and the values that follow."""
        values: dict[str, Any] = {}
        for name in self._copies[0]:
            local = [copies[name] for copies in self._copies]
            everyones = exchange_values(self._workers, f"metric {name!r}", [states_of(metric) for metric in local])
            states = [each for worker in everyones for each in worker]
            alone = self._workers.alone and len(local) == 1
            merged = local[0] if alone else merge_metrics(local, states)
            values.update(_single_numbers(name, merged.compute()))
        return list(values), Arriving(list(values.values()), self._home)


def gather_states(metric: Any) -> None:
    """Makes scores whole that an update kept as they were: in a step, where all that hold parts of them are there."""
    for part in nested_metrics(metric):
        for name, state in part.metric_state.items():
            if holds_divided(state):
                setattr(part, name, gathered(state))


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


def _merge_into(part: Any, sources: Sequence[Any]) -> None:
    for name, reduction in part._reductions.items():
        states = [_to_device(source["states"][name], part.device) for source in sources]
        if states:
            setattr(part, name, states[0] if len(states) == 1 else merge_states(states, reduction))
    part._update_count = sum(source["updates"] for source in sources)
    part._computed = None


def nested_metrics(metric: Any) -> list[Any]:
    """The metric and all metrics inside it, such as the two of a sum or the one of a wrapper."""
    metric_class = require("torchmetrics", "text").Metric
    return [module for module in metric.modules() if isinstance(module, metric_class)]


def fresh_copy(metric: Any, device: torch.device) -> Any:
    """The metric on a device, without its states."""
    fresh = copy.deepcopy(metric).to(device)
    fresh.reset()
    return fresh


def _copy_sharing_states(metric: Any) -> Any:
    """A deep copy whose state tensors are the original's: states can be large, and they are replaced, not written."""
    states = (state for part in nested_metrics(metric) for state in part.metric_state.values())
    tensors = [tensor for state in states for tensor in (state if isinstance(state, list) else [state])]
    return copy.deepcopy(metric, {id(tensor): tensor for tensor in tensors})


def _to_device(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_to_device(item, device) for item in state]
    return state.to(device) if isinstance(state, Tensor) else state


def _single_numbers(name: str, value: Any) -> dict[str, Any]:
    """The logs of one computed value: itself, or one per entry where a metric computes a dict."""
    if isinstance(value, Mapping):
        numbers = {key: _single_numbers(name, item).values() for key, item in value.items()}
        return {f"{name}_{key}": number for key, found in numbers.items() for number in found}
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"metric {name!r} computed a tensor of shape {tuple(value.shape)}; the logs hold single numbers: "
            "choose an average, or wrap it in torchmetrics' ClasswiseWrapper"
        )
    return {name: value}
