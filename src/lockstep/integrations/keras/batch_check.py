"""Compares some batches with Keras's own numbers, the first among them, before anything is updated with them.

The loss, the metrics and what layers assign for the whole batch on one device, in evaluation mode, must be what those
of the shards add up to. They are not where one is no mean or sum over rows: a contrastive loss, a correlation, a
maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import torch
from torch import Tensor

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError
from lockstep.integrations.keras.fixed_draws import compared
from lockstep.integrations.keras.losses import Shard, losses_of_shard
from lockstep.integrations.keras.step import Step
from lockstep.integrations.keras.user_step import UserStep
from lockstep.integrations.keras.variables import ModelVariables, stateless_scope
from lockstep.strategies.base import Strategy

_LOSS_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE = 1e-3
_HALF_GRADIENT_TOLERANCE = 5e-2
_HALF_TOLERANCE = 2e-2  # of models that compute in float16 or bfloat16
# Rounding may put single rows on the other side of a threshold.
_METRIC_TOLERANCE = 2e-2


def check_batch(step: Step, data: Any, strategy: Strategy) -> None:
    """Raises a ConfigError that names the loss, metric or variable which shards of a batch cannot compute.

    Args:
        step: a step of a compiled model that has evaluated the shards; the variables stay as they are.
        data: the whole batch.
        strategy: that of the model.
    """
    model, variables, run, rows = step.model, step.variables, step.run, step.rows
    whole = _changes_of_whole(model, variables, data, rows, is_training=step.is_training)
    _, sums = run.sums(strategy)
    compared = [(variable, total) for variable, total in sums if run.adds_up(variable) or total.is_floating_point()]
    states = {
        id(variable): (total if run.adds_up(variable) else total - variable.value, whole[id(variable)])
        for variable, total in compared
    }
    (total, expected), _ = (states[id(variable)] for variable in model._loss_tracker.variables)
    if not _close(total, expected, _LOSS_TOLERANCE if _is_exact(model) else _HALF_TOLERANCE):
        raise ConfigError(
            f"the loss of a batch of {rows} rows is {float(expected) / rows:.6g}, but the losses of its "
            f"shards have a mean of {float(total) / rows:.6g}: the loss, or a loss added by a layer, is no mean over "
            "the rows; have it return one value a row, or a mean"
        )
    for metric in _single_metrics(model.metrics):
        if not all(_close(*states[id(variable)], _METRIC_TOLERANCE) for variable in metric.variables):
            raise ConfigError(
                f"the metric {metric.name!r} cannot be merged: its state after a batch is not the sum of those "
                "after the shards of the batch; compute it from model.predict after the training"
            )
    for variable, _ in compared:
        if id(variable) not in run.metrics and not _close(*states[id(variable)], _METRIC_TOLERANCE):
            raise ConfigError(
                f"the variable {variable.path!r} cannot be merged: the shards of a batch do not change it by the "
                'mean that the whole batch does; give add_weight aggregation="sum" if it holds a sum over rows, or '
                '"only_first_replica" if it counts batches'
            )


def check_user_step(model: Any, step: UserStep, strategy: Strategy, data: Any, divided: tuple[Any, int]) -> None:
    """Raises a ConfigError if a model's own train_step gets other gradients from shards than from whole rows.

    Nothing is updated. A step that gives other gradients when it is run again is not compared.

    Args:
        model: the model, whose variables stay as they are.
        step: its step.
        strategy: that of the model.
        data: some rows.
        divided: their shards with their sizes, and the number of rows.
    """
    (shards, sizes), rows = divided
    step = replace(step, rows=rows, sizes=sizes.values, is_compared=True)
    gradients = step.run(strategy, shards)[0]
    # Every replica computes with all rows, so that the mean over the replicas is that of one device.
    step = replace(step, rows=rows * strategy.num_replicas_in_sync, sizes=[rows] * len(sizes))
    # A step may change its batch in place, and the replicas would share it.
    copies = [keras.tree.map_structure(_copied, data) for _ in sizes]
    # Twice: a step that draws numbers differs from itself and is not compared
    # (test_a_step_that_draws_numbers_is_not_refused).
    whole, again = (step.run(strategy, PerReplica(copies))[0] for _ in range(2))
    tolerance = _GRADIENT_TOLERANCE if _is_exact(model) else _HALF_GRADIENT_TOLERANCE
    if _same_gradients(again, whole, tolerance) and not _same_gradients(gradients, whole, tolerance):
        raise ConfigError(
            f"{step.name} gets other gradients from the shards of {rows} rows than from all of them on one device: a "
            "loss is no mean over rows; have each be a loss of Keras or a mean over rows, of which none needs another"
        )


def _same_gradients(one: Any, other: Any, tolerance: float) -> bool:
    """Whether the gradients of each optimizer are equal, within a part of the largest one."""
    for gradients, expected in zip(one, other, strict=True):
        pairs = [(a, b) for a, b in zip(gradients, expected, strict=True) if a is not None and b is not None]
        largest = max((float(b.abs().max()) for _, b in pairs), default=0.0)
        if any(float((a - b).abs().max()) > tolerance * largest for a, b in pairs):
            return False
    return True


def _is_exact(model: Any) -> bool:
    return all(layer.compute_dtype in ("float32", "float64") for layer in model._flatten_layers())


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _changes_of_whole(
    model: Any, variables: ModelVariables, data: Any, rows: int, *, is_training: bool
) -> dict[int, Tensor]:
    """By how much one batch changes metrics, which start at 0, and other variables: by Keras alone, by id."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    whole = Shard(rows=rows, all_rows=rows, add=lambda number: number)
    with torch.no_grad(), stateless_scope() as scope, losses_of_shard(whole), compared():
        before = {id(variable): torch.zeros_like(variable.value) for variable in variables.metrics}
        before |= {id(variable): variable.value for variable in (*variables.trainable, *variables.statistics)}
        scope.state_mapping.update(before)
        outputs = model(x, training=False) if model._call_has_training_arg else model(x)
        loss = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=is_training)
        model._loss_tracker.update_state(loss, sample_weight=rows)
        model.compute_metrics(x, y, outputs, sample_weight=weight)
    return {key: scope.state_mapping[key] - value for key, value in before.items() if value.dtype != torch.bool}


def _single_metrics(metrics: Sequence[Any]) -> Iterator[Any]:
    """The metrics that hold variables of their own, those of containers included."""
    for metric in metrics:
        inner = [part for part in getattr(metric, "metrics", ()) if part is not metric]
        if inner:
            yield from _single_metrics(inner)
        elif metric.variables:
            yield metric


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    largest = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest * 0.1 + 1e-6, equal_nan=True)
