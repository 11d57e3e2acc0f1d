"""The loss that a module computes itself, as those of transformers do when they get labels.

    compile(optimizer)            no loss: the module's outputs have one
    {"input_ids": ..., "labels": ...}  ->  outputs.loss, a mean  ->  (total, count), by how torch computed it

What the mean is over differs: class numbers that are not ignored, those but the first of each text, rows. The call of
torch's loss inside the module tells, as ``loss_reduction`` traces it: no knowledge of the module's class is needed. A
loss that is put together of several is compared with that of its rows in two parts, and refused if these do not add up.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import ReplicaContext
from lockstep.train.batch import ShardRows, Sums, checked_alone, keeping_modes, module_arguments
from lockstep.train.loss_reduction import ReductionTracer
from lockstep.train.loss_totals import LossTotals, loss_sums
from lockstep.watch.check_schedule import is_due
from lockstep.watch.loss_parts import mismatch_of_parts

_INSTEAD = (
    "give compile a loss(outputs, targets) of outputs.logits that returns one value per label, or a pair (total, count)"
)


def check_computes_loss(module: nn.Module) -> None:
    """Raises a ConfigError if the module's forward takes no labels, so that it cannot compute a loss."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "labels" not in parameters and not takes_any:
        raise ConfigError(
            f"compile got no loss, and the forward of {type(module).__name__} takes no labels to compute one from; "
            "give a function loss(outputs, targets), or a name such as 'mse'"
        )


def module_loss_sums(
    module: MirroredModule, tracer: ReductionTracer, outputs: Any, shard: ShardRows, context: ReplicaContext, step: int
) -> Sums:
    """The total and the count of the loss in a shard's outputs, which ``tracer`` has seen computed.

    ``shard`` has the module's inputs in place of outputs; ``step`` counts the shards of a pass from 1.

    Raises:
        ConfigError: the outputs have no loss, or one that shards do not add up to.
    """
    totals = _totals(tracer, outputs, shard.rows, type(module.module).__name__)
    on_cpu = context.device.kind == "CPU"
    if totals.assumed_mean and context.num_replicas_in_sync > 1 and is_due(step, on_cpu=on_cpu):
        _check_parts(module.copies[context.local_replica], shard, context)
    return totals.total, totals.count


def _totals(tracer: ReductionTracer, outputs: Any, rows: int, kind: str) -> LossTotals:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"compile got no loss, and the outputs of {kind} have none ({type(outputs).__name__}); give the module "
            "labels: batches that are dicts with 'labels', or (x, y) with 'labels' in x; or give compile a loss"
        )
    pair = tracer.pair_of(loss)
    if pair is not None:
        return LossTotals(*loss_sums(pair, rows))
    if tracer.sum_of(loss) is not None:
        raise ConfigError(f"the loss that {kind} computes is a sum, and shards are divided by a count; {_INSTEAD}")
    return LossTotals(*loss_sums(loss.reshape(()), rows), assumed_mean=True)


@torch.no_grad()
def _check_parts(copy: nn.Module, shard: ShardRows, context: ReplicaContext) -> None:
    """Compares the loss of a shard, taken as a mean over its rows, with that of its rows in two parts."""
    kind = type(copy).__name__

    def measured(part: ShardRows) -> LossTotals:
        args, kwargs = module_arguments(part.outputs)
        with ReductionTracer() as tracer:
            return _totals(tracer, copy(*args, **kwargs), part.rows, kind)

    with keeping_modes(copy):
        # Dropout would draw other masks for the parts than for the whole.
        copy.eval()
        alone = partial(checked_alone, context)
        with alone():
            whole = measured(shard)
        reason = mismatch_of_parts(measured, shard, whole, alone=alone)
    if reason is not None:
        raise ConfigError(
            f"the loss that {kind} computes is put together of several, and no mean over the rows ({reason}), so the "
            f"shards' losses do not add up to that of the global batch; {_INSTEAD}"
        )
