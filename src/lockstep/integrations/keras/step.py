"""What runs in each replica: Keras's own training, evaluation and prediction step, on one shard.

A replica without rows computes with a row that another one has, and its results count for nothing: others may wait for
it in an exchange, and not every layer can be called without rows.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction
from lockstep.integrations.keras.compiled import CompiledForward
from lockstep.integrations.keras.fixed_draws import compared
from lockstep.integrations.keras.losses import Shard, losses_of_shard
from lockstep.integrations.keras.metrics import averaged, computes_metrics
from lockstep.integrations.keras.variables import ModelVariables, ReplicaVariables, RunVariables
from lockstep.replicas.context import ReplicaContext
from lockstep.train.batch import replica_of_step


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of all replicas. Its methods run in each, with its shard of the batch and the number of rows that count.

    Args:
        model: the Keras model.
        variables: its variables.
        run: their values in the replicas, in which the methods leave what the step computes.
        rows: of the whole batch.
        scale: what the optimizer multiplies the loss by.
        needs_modes: whether torch's function modes must see what the model calls.
        compiled: calls the model by compiled code; None where the model is called as it is.
        is_training: whether the loop trains, where the model itself is evaluated.
    """

    model: Any
    variables: ModelVariables
    run: RunVariables
    rows: int
    scale: float = 1.0
    needs_modes: bool = True
    compiled: CompiledForward | None = None
    is_training: bool = False

    def train(self, data: Any, rows: int) -> None:
        """Forward and backward."""
        with self.run.in_replica(rows / self.rows) as values:
            loss = self._loss(values, data, rows, training=True)
            weights = [values.value(variable) for variable in self.variables.trainable]
            if weights:  # as in Keras, which trains nothing where all layers are frozen
                values.gradients = torch.autograd.grad(loss * (values.share * self.scale), weights, allow_unused=True)

    def evaluate(self, data: Any, rows: int) -> None:
        """The loss and the metrics."""
        with self.run.in_replica(rows / self.rows) as values:
            self._loss(values, data, rows, training=False)

    def check(self, data: Any, rows: int) -> None:
        """The loss and the metrics as ``evaluate`` has them, to compare them with those of the whole batch.

        ``compute_loss`` of the model's class is told whether the loop trains, as in the steps that follow.
        """
        with self.run.in_replica(rows / self.rows) as values, compared():
            self._loss(values, data, rows, training=False)

    def predict(self, data: Any, rows: int) -> Any:
        """The outputs."""
        with self.run.in_replica(rows / self.rows):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(moved(data, replica_of_step()))
            return keras.tree.map_structure(lambda output: output[:rows], self._outputs(x, training=False))

    def _outputs(self, x: Any, *, training: bool) -> Any:
        if self.compiled is not None:
            default_seed = self.run.replicas[replica_of_step().local_replica].default_seed
            return self.compiled(x, default_seed, training=training)
        # Function modes run Python code for each call of torch. A model of Keras's own layers needs them in a few
        # functions only, see kernels.
        with nullcontext() if self.needs_modes else DisableTorchFunction():
            return self.model(x, training=training) if self.model._call_has_training_arg else self.model(x)

    def _loss(self, values: ReplicaVariables, data: Any, rows: int, *, training: bool) -> Tensor:
        """The mean loss of this replica's shard. Updates the metrics."""
        context = replica_of_step()
        shard = Shard(rows=rows, all_rows=self.rows, add=partial(context.all_reduce, "sum"))
        x, y, weight = keras.utils.unpack_x_y_sample_weight(moved(data, context))
        with losses_of_shard(shard):
            outputs = self._outputs(x, training=training)
            training = training or self.is_training
            loss: Tensor = self.model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=training)
            with torch.no_grad():
                self.model._loss_tracker.update_state(loss, sample_weight=rows)
                results = self.model.compute_metrics(x, y, outputs, sample_weight=weight)
                if computes_metrics(self.model):
                    values.results = averaged(context, shard.share, results)
        return loss


def moved(data: Any, context: ReplicaContext) -> Any:
    """A shard on the device of its replica."""
    device = context.device.torch_device
    return keras.tree.map_structure(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, data
    )
