"""The loss of one replica: what ``loss(outputs, targets)`` returned as a total and a count, and whether shards add up.

Replicas back-propagate totals, and the update divides once by the summed counts. That is exact if

    loss(8 rows) = (total, count)   is   loss(first rows) + loss(next rows) + ...

Sums returned as means, means over something else than the rows, and losses that compare rows (contrastive ones, outputs
[n, 1] beside targets [n]) would train with other numbers on another number of replicas. The first step refuses them. A
loss that cannot be checked is used with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_leaves
from lockstep.errors import ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.parallel.vocab_parallel import has_sharded_logits
from lockstep.replicas.context import ReplicaContext
from lockstep.strategies.average_loss import fitted_weight
from lockstep.train.batch import ShardRows, Sums, checked_alone
from lockstep.train.compile import Loss
from lockstep.train.loss_reduction import LabelMean, ReductionTracer
from lockstep.train.string_identifiers import NamedLoss, without_partial
from lockstep.watch.captures import captured_by, state_of
from lockstep.watch.check_schedule import is_due
from lockstep.watch.loss_parts import Mismatch, mismatch_of_parts, rounding_of
from lockstep.watch.row_dependence import current_row_watch

MOST_PARTS = 8
_ADVICE = "return one value per row (of torch's losses: reduction='none'), or a pair (total, count)"
_RETURN = "return a tensor with one value per example, a pair (total, count), or a scalar mean"


def loss_sums(returned: Any, rows: int, sample_weight: Tensor | None = None) -> Sums:
    """Turns the result of a loss function into ``(total, count)``.

    Args:
        returned: values per example, of any shape whose first dimension is ``rows``; or a pair ``(total, count)``; or
            a scalar, taken as the mean over the examples.
        rows: the number of examples of this shard.
        sample_weight: of shape [rows], or one that broadcasts to the values. It multiplies the values; the count
            stays the number of values.

    Returns:
        ``total``, a scalar tensor in at least float32 that carries the gradient, and ``count``, a number or a scalar.

    Raises:
        ConfigError: another shape or type, or sample weights beside a loss that is already reduced.
    """
    is_pair = isinstance(returned, tuple)
    if not is_pair and not isinstance(returned, Tensor):
        raise ConfigError(f"the loss returned {type(returned).__name__}; {_RETURN}")
    if is_pair or returned.dim() == 0:
        if sample_weight is not None:
            kind = "a pair (total, count)" if is_pair else "a scalar mean"
            raise ConfigError(
                f"sample_weight came with a loss that returns {kind}, which cannot be weighted any more; return one "
                "value per example (such as reduction='none'), or give compile the loss by name, such as 'mse'"
            )
        return _pair(returned) if is_pair else (_at_least_float32(returned) * rows, float(rows))
    if returned.shape[0] != rows:
        raise ConfigError(f"the loss returned shape {tuple(returned.shape)} for {rows} examples; {_RETURN}")
    values = _at_least_float32(returned)
    if sample_weight is not None:
        values = values * fitted_weight(sample_weight, returned)
    return values.sum(), float(returned.numel())


def no_examples(outputs: Tensor) -> tuple[Tensor, float]:
    """The sums of a shard without rows: a zero that is connected to ``outputs``, so that backward runs through it."""
    return _at_least_float32(outputs).sum() * 0.0, 0.0


def _pair(returned: tuple[Any, ...]) -> Sums:
    if len(returned) != 2 or not isinstance(returned[0], Tensor) or not all(map(_is_number, returned)):
        kinds = [
            f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__ for value in returned
        ]
        raise ConfigError(
            f"the loss returned a tuple of {', '.join(kinds)}; return a pair (total, count): a scalar tensor, the sum, "
            "and a number"
        )
    total, count = _at_least_float32(returned[0]).reshape(()), returned[1]
    return total, count.detach().reshape(()) if isinstance(count, Tensor) else float(count)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else type(value) in (int, float)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(frozen=True, slots=True)
class LossTotals:
    """The loss of some rows as a total, a scalar that carries the gradient, and a count."""

    total: Tensor
    count: Tensor | float
    assumed_mean: bool = False  # whether the loss returned a scalar that is taken as the mean over the rows
    label_means: Sequence[LabelMean] = ()  # means over labels that the scalar was computed from
    values: Any = None  # what the loss returned

    @property
    def rounding(self) -> float:
        """The relative rounding of the loss's dtype."""
        return rounding_of(self.values)

    def numbers(self) -> tuple[float, float]:
        """Total and count on the host."""
        total, count = (
            number.detach() if isinstance(number, Tensor) else number for number in (self.total, self.count)
        )
        return float(total), float(count)


def checked_sums(
    loss: Loss, shard: ShardRows, context: ReplicaContext, *, sharded: bool, step: int, combines_rows: bool = False
) -> Sums:
    """The total and the count of a shard of at least one row, which is a part of the global batch if ``sharded``.

    ``step`` counts the shards of a pass from 1: the first ones are checked, unless rows are combined on purpose.

    Raises:
        ConfigError: the loss returned something else than a loss, or one that shards do not add up to.
    """
    on_cpu = context.device.kind == "CPU"
    due = is_due(step, on_cpu=on_cpu)
    if due and isinstance(loss, NamedLoss) and not has_sharded_logits(shard.outputs):
        loss.check_outputs(shard.outputs)
    sums = _totals(loss, sharded, shard)
    if sharded and not combines_rows and (due or sums.label_means) and not has_sharded_logits(shard.outputs):
        if sums.label_means and (on_cpu or step == 1):
            _check_label_means(loss, sums.label_means, on_cpu)
        # A total and a count are compared less often: the row watch, which looks in the steps between, needs no counts.
        if due and (sums.assumed_mean or step.bit_count() == 1):
            _check_parts(loss, shard, sums, context, parts=MOST_PARTS if step == 1 else 2)
    return sums.total, sums.count


def _totals(loss: Loss, sharded: bool, shard: ShardRows) -> LossTotals:
    weight = shard.batch.sample_weight
    if weight is not None and isinstance(loss, NamedLoss):
        values, count = loss.values(shard.outputs, shard.batch.y)
        total = (_at_least_float32(values) * fitted_weight(weight, values)).sum()
        return LossTotals(total, count, values=values)
    if isinstance(loss, NamedLoss) and (pair := loss.pair(shard.outputs, shard.batch.y)) is not None:
        return LossTotals(*loss_sums(pair, shard.rows), values=pair[0])
    with ReductionTracer() as tracer:
        returned = loss(shard.outputs, shard.batch.y)
    if not isinstance(returned, Tensor) or returned.dim() > 0 or weight is not None:
        return LossTotals(*loss_sums(returned, shard.rows, weight), values=returned)
    pair, summed = tracer.pair_of(returned), tracer.sum_of(returned)
    if pair is not None:
        return LossTotals(*loss_sums(pair, shard.rows), values=returned)
    if summed is not None and sharded:
        raise ConfigError(
            f"the loss {_name_of(loss)} returned a sum, of {summed}, but the losses of all shards are divided by what "
            f"they count; return the mean, such as reduction='mean', or {_ADVICE}"
        )
    total, count = loss_sums(returned, shard.rows)
    return LossTotals(total, count, assumed_mean=True, label_means=tracer.label_means, values=returned)


def _check_label_means(loss: Loss, label_means: Sequence[LabelMean], on_cpu: bool) -> None:
    if not all(mean.counts_rows() for mean in label_means):
        raise ConfigError(
            f"the loss {_name_of(loss)} computes with a mean over labels that do not count alike, because some are "
            "ignored or their classes have weights, so it is not a mean over the rows; return that mean alone, or a "
            "pair (total, count)"
        )
    if not on_cpu:
        warnings.warn(
            f"the loss {_name_of(loss)} computes with a mean over labels, and is taken as a mean over the rows, which "
            "it is only as long as no label is ignored; if some are, return a pair (total, count)",
            stacklevel=2,
        )


def _check_parts(loss: Loss, shard: ShardRows, sums: LossTotals, context: ReplicaContext, *, parts: int) -> None:
    """Compares a shard with its parts, and refuses a loss that they do not add up to."""
    mismatch = mismatch_of_parts(
        partial(_totals, loss, True), shard, sums, alone=partial(checked_alone, context), parts=parts
    )
    if isinstance(mismatch, Mismatch):
        shapes = [tuple(leaf.shape) for leaf in tree_leaves((shard.outputs, shard.batch.y)) if isinstance(leaf, Tensor)]
        what = "the sum over" if mismatch.is_sum else "no mean over"
        raise ConfigError(
            f"the loss {_name_of(loss)} returns {what} the rows, so its shards do not add up to the loss of the global "
            f"batch (shapes of outputs and targets: {', '.join(map(str, shapes))}); {_ADVICE}. A loss that compares "
            "rows with each other needs a loop of its own, with ls.get_replica_context().all_gather"
        )
    # Where the outputs are not rows, such as the logits of masked tokens, a returned total and count are trusted.
    if mismatch is not None and (sums.assumed_mean or not shard.has_other_outputs()):
        reading = "a mean over" if sums.assumed_mean else "adding up over"
        warnings.warn(
            f"the loss {_name_of(loss)} is taken as {reading} the rows, which could not be checked: {mismatch}; if "
            f"it is not, {_ADVICE}",
            stacklevel=2,
        )


def _name_of(loss: Any) -> str:
    loss = without_partial(loss)
    return repr(loss.name) if isinstance(loss, NamedLoss) else repr(getattr(loss, "__qualname__", type(loss).__name__))


def refuse_mixed_rows(loss: Loss | None, *, combines_rows: bool = False) -> None:
    """After the pass of a replica: refuses a module, or a loss if there is one, that combines the rows of its shard.

    It is warned of where rounding may explain it, and where rows are combined at random, as by mixup. With
    ``combines_rows`` it is intended.

    Raises:
        ConfigError: rows are combined.
    """
    watch = current_row_watch()
    for mixing in () if watch is None or combines_rows else watch.mixings:
        of_loss = "" if loss is None else f", or the loss {_name_of(loss)},"
        what = (
            f"the module{of_loss} compares or combines the rows of its shard ({mixing}), so its "
            "shards do not add up to what one device computes of the global batch"
        )
        if mixing.is_certain and not mixing.is_random:
            raise ConfigError(
                f"{what}; rows are dimension 0 of the inputs: give recurrent and attention layers batch_first=True, "
                "take statistics by a norm layer of torch, and compare rows in a loop of your own, with "
                "ls.get_replica_context().all_gather; compile(combines_rows=True) lets each replica combine those of "
                "its shard"
            )
        warnings.warn(f"{what}; it is taken as intended, or as rounding: {mixing.difference:.1g} of it", stacklevel=2)


@contextmanager
def warning_of_loss_state(loss: Any, replicas: int) -> Iterator[None]:
    """Warns if the step in the block changes the loss object: a count of calls would rise once for every replica."""
    shared = replicas > 1 and not isinstance(loss, MirroredModule)
    before = _states_kept_by(loss) if shared else {}
    yield
    now = _states_kept_by(loss) if shared else {}
    changed = [name for name, (_, state) in before.items() if name in now and now[name][1] != state]
    if changed:
        warnings.warn(
            f"the loss {_name_of(loss)} changes {', '.join(map(repr, changed))}, which every one of {replicas} "
            "replicas does, and more often than there are steps; change what the loss depends on in a callback, in "
            "on_train_batch_begin",
            stacklevel=3,
        )


def _states_kept_by(loss: Any) -> dict[str, tuple[Any, Any]]:
    """What the function has captured, or the numbers and buffers of a module, by name, with their states."""
    values = dict(captured_by(loss))
    for path, part in loss.named_modules() if isinstance(loss, nn.Module) else ():
        numbers = {name: value for name, value in vars(part).items() if type(value) in (int, float)}
        values |= {f"{path}.{name}".lstrip("."): value for name, value in {**numbers, **part._buffers}.items()}
    return {name: (value, state_of(value)) for name, value in values.items()}
