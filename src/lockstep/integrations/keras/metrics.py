"""Metrics in the replicas of a step: their results there are those of all replicas.

    metric.update_state   with the shard
    metric.result()       of the state before the step and of the shards of all replicas, added up
    other numbers         that a step returns are averaged over the rows

For what a model's class computes by itself: a ``train_step``, or ``compute_metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import get_stateless_scope
from torch import Tensor

from lockstep._torch_compat import tree_flatten, tree_unflatten
from lockstep.integrations.keras.variables import summed
from lockstep.replicas.context import ReplicaContext, get_replica_context


def computes_metrics(model: Any) -> bool:
    """Whether the model's class has a ``compute_metrics`` of its own, whose results Keras's step returns."""
    return type(model).compute_metrics is not keras.Model.compute_metrics


def averaged(context: ReplicaContext, share: float, results: Any) -> Any:
    """A structure of values, of which the floating-point numbers become their means over all replicas' rows."""
    leaves, structure = tree_flatten(results)
    numbers = {
        at: leaf
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point())
    }
    if not numbers:
        return results
    values = torch.stack([torch.as_tensor(number).detach().cpu().double() for number in numbers.values()])
    means = context.all_reduce("sum", values * share if share else torch.zeros_like(values))
    averages = {
        at: mean.to(leaf.device, leaf.dtype) if isinstance(leaf, Tensor) else float(mean)
        for (at, leaf), mean in zip(numbers.items(), means, strict=True)
    }
    return tree_unflatten([averages.get(at, leaf) for at, leaf in enumerate(leaves)], structure)


@contextmanager
def results_of_all(metrics: Sequence[Any]) -> Iterator[None]:
    """A block in which ``result`` of these metrics, called in a replica, is that of all replicas."""
    with ExitStack() as after:
        for metric in metrics:
            # object's, as Keras's own __setattr__ would track the function as a part of the metric.
            object.__setattr__(metric, "result", partial(_result_of_all, metric, metric.result))
            after.callback(object.__delattr__, metric, "result")
        yield


def _result_of_all(metric: Any, local_result: Callable[[], Any]) -> Any:
    context, step = get_replica_context(), get_stateless_scope()
    if context is None:
        return local_result()

    def combine(values_of_replicas: list[list[Tensor]]) -> Any:
        totals = zip(metric.variables, summed(context.strategy, values_of_replicas), strict=True)
        return metric.stateless_result(
            [variable._value + total if variable.aggregation == "sum" else total for variable, total in totals]
        )

    with torch.no_grad():
        parts = [step.part(variable) for variable in metric.variables]
        return context.meet(f"{metric.name}.result", parts, combine)
