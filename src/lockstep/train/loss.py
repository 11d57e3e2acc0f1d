"""What ``loss(outputs, targets)`` returned, as a sum and a count: the pure step between a loss and the engine.

The engine back-propagates sums and divides once by the summed counts, before the update. That makes short shards, token
weights and gradient accumulation exact. Nothing here knows of replicas.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.errors import CollectiveError, ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.parallel.vocab_parallel import has_sharded_logits
from lockstep.replicas.context import ReplicaContext, in_context
from lockstep.strategies.captured import captured_by, state_of
from lockstep.train.batch import LabelledBatch, ShardRows, preserving_rng
from lockstep.train.loss_reduction import LabelMean, ReductionTracer


def loss_sums(returned: Any, rows: int, sample_weight: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
    """Turns the result of a loss function into ``(total, count)``.

    Args:
        returned: per-example values of any shape whose first dimension is ``rows``; or a pair ``(total, count)``; or
            a scalar, taken as the mean over the examples.
        rows: the number of examples of this shard.
        sample_weight: of shape [rows], or one that broadcasts to the values. It multiplies the values; the count
            stays the number of values.

    Returns:
        ``total``, a scalar tensor in at least float32 that carries the gradient, and ``count``, a number or a scalar.

    Raises:
        ConfigError: another shape or type, or sample weights beside a loss that is already reduced.
    """
    if isinstance(returned, tuple):
        _reject_weight(sample_weight, "a pair (total, count)")
        return _pair(returned)
    if not isinstance(returned, Tensor):
        raise ConfigError(
            f"the loss returned {type(returned).__name__}; return a tensor with one value per example, "
            "a pair (total, count), or a scalar mean"
        )
    if returned.dim() == 0:
        _reject_weight(sample_weight, "a scalar mean")
        return _at_least_float32(returned) * rows, float(rows)
    if returned.shape[0] != rows:
        raise ConfigError(
            f"the loss returned shape {tuple(returned.shape)} for {rows} examples; return one value per example "
            f"(first dimension {rows}), a pair (total, count), or a scalar mean"
        )
    return _values(returned, sample_weight)


def no_examples(outputs: Tensor) -> tuple[Tensor, float]:
    """The sums of a shard without rows: a zero still connected to ``outputs``, so that backward runs through it."""
    return _at_least_float32(outputs).sum() * 0.0, 0.0


def _values(values: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, float]:
    exact = _at_least_float32(values)
    if sample_weight is not None:
        exact = exact * _fit_weight(sample_weight, values)
    return exact.sum(), float(values.numel())


def _pair(returned: tuple[Any, ...]) -> tuple[Tensor, Tensor | float]:
    if len(returned) != 2:
        raise ConfigError(f"the loss returned a tuple of {len(returned)} items; return a pair (total, count)")
    total, count = returned
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ConfigError(f"the loss returned a pair whose total is {shape}; return a scalar tensor, the sum")
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ConfigError(f"the loss returned a pair whose count has shape {tuple(count.shape)}; return one number")
        return _at_least_float32(total).reshape(()), count.detach().reshape(())
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise ConfigError(f"the loss returned a pair whose count is a {type(count).__name__}; return a number")
    return _at_least_float32(total).reshape(()), float(count)


def _fit_weight(weight: Tensor, values: Tensor) -> Tensor:
    """The weights with as many dimensions as the values: [rows] or [rows, 1] beside [rows, tokens], and so on."""
    shape = list(weight.shape)
    while len(shape) > values.dim() and shape[-1] == 1:
        shape.pop()
    shape += [1] * (values.dim() - len(shape))
    fits = len(shape) == values.dim() and all(a in (1, b) for a, b in zip(shape[1:], values.shape[1:], strict=True))
    if not fits or shape[0] != values.shape[0]:
        raise ConfigError(
            f"sample_weight has shape {tuple(weight.shape)} beside loss values of shape {tuple(values.shape)}; "
            f"give shape ({values.shape[0]},) or one that broadcasts to the values"
        )
    return weight.reshape(shape)


def _reject_weight(sample_weight: Tensor | None, what: str) -> None:
    if sample_weight is not None:
        raise ConfigError(
            f"sample_weight came with a loss that returns {what}, which cannot be weighted any more; "
            "return one value per example (such as reduction='none')"
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


Loss = Callable[[Any, Any], Any]

MOST_PARTS = 8
FIRST_LOOKS = 8
"""On a CPU, a scalar that is taken as a mean is looked at in so many steps, and at 16, 32 and 64: the first may have
nothing that tells means apart, such as no padding, or a last layer of zeros. A GPU would have to be waited for, and
records its steps, so only the first is."""
LAST_LOOK = 64
SUSPECT = 100
"""Differences of more roundings than this, of the loss's own dtype, are told."""
CERTAIN = 4096
"""Differences of more than this are none of rounding. Half precision, which the loss may have computed with, has 16."""
_WAYS = "return one value per row (of torch's losses: reduction='none'), or a pair (total, count)"
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError)


@dataclass(frozen=True, slots=True)
class LossTotals:
    """What a loss has added up for some rows.

    Args:
        total: a scalar, which carries the gradient.
        count: by which the totals of all replicas are divided.
        assumed: whether it was a scalar that is taken as the mean over the rows.
        beside: the labels of means that went into it and do not count alike for sure.
        rounding: of the loss's dtype, relative.
        scalar: what was returned, where total and count were seen in how it was computed.
    """

    total: Tensor
    count: Tensor | float
    assumed: bool = False
    beside: Sequence[LabelMean] = ()
    rounding: float = torch.finfo(torch.float32).eps
    scalar: Tensor | None = None


class ReplicaLoss:
    """The loss on one replica, in one pass."""

    def __init__(self) -> None:
        self._steps = 0
        self._is_mean = False  # although it looks like a quotient of what adds up

    def sums(
        self, loss: Loss, outputs: Any, batch: LabelledBatch, rows: int, context: ReplicaContext, *, divided: bool
    ) -> LossTotals:
        """The total and the count of rows.

        Args:
            loss: the user's.
            outputs: the module's, for these rows.
            batch: with the targets and sample weights of these rows.
            rows: how many, at least one.
            context: the replica's.
            divided: whether they are a part of the global batch only.

        Raises:
            ConfigError: the loss returned what is no loss, or one that is not the sum of its parts.
        """
        shard = ShardRows(outputs, batch, rows)
        sums = _sums_of(loss, divided, self._is_mean, shard)
        self._steps += 1
        if divided and not has_sharded_logits(outputs):
            on_cpu = context.device.kind == "CPU"
            if sums.beside and (on_cpu or self._steps == 1):
                _check_labels(loss, sums.beside, on_cpu)
            if self._steps == 1 or (on_cpu and sums.assumed and self._looks_again):
                return self._looked_at(loss, shard, sums, context)
        return sums

    def _looked_at(self, loss: Loss, shard: ShardRows, sums: LossTotals, context: ReplicaContext) -> LossTotals:
        found = _look(partial(_sums_of, loss, True, self._is_mean), shard, sums, context)
        if isinstance(found, _Refused) and sums.scalar is not None:  # as of x.mean(0).sum() / torch.tensor(3)
            mean = _as_mean(sums.scalar, shard.rows)
            second = _look(partial(_sums_of, loss, True, True), shard, mean, context)
            if not isinstance(second, _Refused):
                self._is_mean, sums, found = True, mean, second
        if isinstance(found, _Refused):
            raise ConfigError(_refusal(loss, shard, sums, found))
        # Total and count of outputs that are no rows, as those of the words to be guessed, are the program's word.
        if found is not None and (sums.assumed or not shard.hides()):
            taken = "a mean over" if sums.assumed else "adding up over"
            _warn(
                f"the loss {name_of(loss)} is taken as {taken} the rows, which could not be checked: {found.why}; if "
                f"it is not, {_WAYS}"
            )
        return sums

    @property
    def _looks_again(self) -> bool:
        return self._steps <= FIRST_LOOKS or (self._steps <= LAST_LOOK and self._steps.bit_count() == 1)


def _as_mean(scalar: Tensor, rows: int, beside: Sequence[LabelMean] = ()) -> LossTotals:
    total, count = loss_sums(scalar, rows)
    return LossTotals(total, count, assumed=True, beside=beside, rounding=_rounding(scalar))


def _sums_of(loss: Loss, divided: bool, is_mean: bool, shard: ShardRows) -> LossTotals:
    weight = shard.batch.sample_weight
    with ReductionTracer() as calls:
        returned = loss(shard.outputs, shard.batch.y)
    rounding = _rounding(returned)
    if not isinstance(returned, Tensor) or returned.dim() > 0 or weight is not None:
        return LossTotals(*loss_sums(returned, shard.rows, weight), rounding=rounding)
    pair, summed = calls.pair_of(returned), calls.sum_of(returned)
    if pair is not None and not is_mean:
        return LossTotals(*loss_sums(pair, shard.rows), rounding=rounding, scalar=returned)
    if summed is not None and divided:
        raise ConfigError(
            f"the loss {name_of(loss)} returned a sum, of {summed}, but the losses of all shards are divided by what "
            "they count; return the mean, such as reduction='mean', and with SGD give a learning rate that is as many "
            f"times larger as the global batch has rows, or {_WAYS}"
        )
    return _as_mean(returned, shard.rows, calls.labels)


def _check_labels(loss: Loss, beside: Sequence[LabelMean], on_cpu: bool) -> None:
    if not all(labels.count_alike() for labels in beside):
        raise ConfigError(
            f"the loss {name_of(loss)} computes with a mean over labels that do not count alike, for some are ignored "
            "or their classes have weights, so that it is no mean over the rows; return that mean alone, or a pair "
            "(total, count), or divide each sum by its own count of all replicas, which is "
            'ls.get_replica_context().all_reduce("sum", count), in a loop of your own with strategy.run'
        )
    if not on_cpu:
        _warn(
            f"the loss {name_of(loss)} computes with a mean over labels, and is taken as a mean over the rows, which "
            "it is only as long as no label is ignored; if some are, return a pair (total, count)"
        )


@dataclass(frozen=True, slots=True)
class _Unchecked:
    """Nothing can be said, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class _Refused:
    """A shard is not the sum of its parts."""

    whole: _Numbers
    parts: Sequence[_Numbers]


Measure = Callable[[ShardRows], LossTotals]


def _look(
    measure: Measure, shard: ShardRows, sums: LossTotals, context: ReplicaContext
) -> _Unchecked | _Refused | None:
    """Compares a shard with its parts; None where it is their sum."""
    for with_gradients in (False, True):  # a penalty on gradients needs some, and most losses are faster without
        try:
            with (
                torch.set_grad_enabled(with_gradients),
                preserving_rng(context),
                in_context(context.alone()),
            ):
                return _compared(measure, shard.tracked() if with_gradients else shard, sums)
        except CollectiveError:  # of a loss that knows of the other replicas
            return _Unchecked("it calls collectives") if sums.assumed else None
        except _FAILURES as error:
            first_line = str(error).strip().split("\n", 1)[0]
            why = f"on some of the rows alone it ends in {type(error).__name__}: {first_line}"
    return _Unchecked(why)


def _compared(measure: Measure, shard: ShardRows, sums: LossTotals) -> _Unchecked | _Refused | None:
    whole = _Numbers.of(sums)
    if not whole.finite:
        return None
    index = shard.index()
    if index is None:
        return _Unchecked("no tensor of its arguments has a row for each example")
    if shard.rows == 1:  # twice the same row must give the same mean
        index = index.repeat(2)
        whole = _Numbers.of(measure(shard.take(index)))
    pieces = index.tensor_split(max(2, min(MOST_PARTS, shard.rows // 2)))
    parts = [_Numbers.of(measure(shard.take(piece))) for piece in pieces]
    apart, suspect = whole.apart(parts), _suspect(sums.rounding)
    if apart <= suspect:
        hidden = sums.assumed and shard.hides() and _depends_on_hidden(measure, shard, whole, suspect)
        return _Unchecked("it takes from the outputs what the module has computed over its rows") if hidden else None
    if whole.apart([_Numbers.of(measure(shard.take(index)))]) > suspect:
        return _Unchecked("it gives another value for the same rows when it is called again")
    if shard.hides():
        return _Unchecked("the outputs hold what has no row for each example")
    if apart <= _certain(max(sums.rounding, _rounding((shard.outputs, shard.batch.y)))):
        return _Unchecked(f"its parts differ from the whole by {apart:.1g} of it, which may be rounding")
    return _Refused(whole, parts)


def _depends_on_hidden(measure: Measure, shard: ShardRows, whole: _Numbers, suspect: float) -> bool:
    try:
        other = _Numbers.of(measure(shard.without_hidden()))
    except _FAILURES:
        return True
    return whole.apart([other]) > suspect


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A total and a count on the host."""

    total: float
    count: float

    @staticmethod
    def of(sums: LossTotals) -> _Numbers:
        total, count = (each.detach() if isinstance(each, Tensor) else each for each in (sums.total, sums.count))
        return _Numbers(float(total), float(count))

    @property
    def finite(self) -> bool:
        """Whether both are numbers."""
        return math.isfinite(self.total) and math.isfinite(self.count)

    def apart(self, parts: Sequence[_Numbers]) -> float:
        """How far these numbers are from the sums of the parts', relative to the larger; infinite where one is NaN."""
        if not all(part.finite for part in parts):
            return math.inf
        return max(
            _apart(self.total, [part.total for part in parts]), _apart(self.count, [part.count for part in parts])
        )


def _apart(whole: float, parts: Sequence[float]) -> float:
    return abs(sum(parts) - whole) / max(sum(map(abs, parts)), abs(whole), 1e-30)


def _refusal(loss: Loss, shard: ShardRows, sums: LossTotals, found: _Refused) -> str:
    means = [part.total / part.count for part in found.parts if part.count]
    whole = found.whole.total / found.whole.count if found.whole.count else math.nan
    is_sum = sums.assumed and math.isclose(sum(means), whole, rel_tol=_certain(sums.rounding))
    shapes = [tuple(leaf.shape) for leaf in tree_leaves((shard.outputs, shard.batch.y)) if isinstance(leaf, Tensor)]
    what = (
        "the sum over the rows, expected their mean"
        if is_sum
        else "no mean over the rows: it gives something else for all rows than for some of them and the others"
    )
    return (
        f"the loss {name_of(loss)} returns {what}, so that its shards do not add up to the loss of the global batch "
        f"(shapes of outputs and targets: {', '.join(map(str, shapes))}); {_WAYS}, which no other row has a part in. "
        "What compares rows with each other needs a loop of its own, with ls.get_replica_context().all_gather"
    )


def _rounding(values: Any) -> float:
    """Relative, of the least exact numbers; single precision at the best, with which a loss may have computed."""
    dtypes = {leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    return max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))


def _suspect(rounding: float) -> float:
    return rounding * (4 if rounding > 1e-4 else SUSPECT)


def _certain(rounding: float) -> float:
    return rounding * (16 if rounding > 1e-4 else CERTAIN)


def name_of(loss: Any) -> str:
    """What a loss function is called in messages."""
    while isinstance(loss, partial):
        loss = loss.func
    return repr(getattr(loss, "__qualname__", type(loss).__name__))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@contextmanager
def warning_of_loss_state(loss: Any, replicas: int) -> Iterator[None]:
    """Around a step, outside replicas: warns of numbers and containers of the loss that the step has changed.

    Args:
        loss: that was given to ``compile``.
        replicas: how many call it.
    """
    if replicas == 1 or isinstance(loss, MirroredModule):
        yield
        return
    before = {name: (value, state_of(value)) for name, value in _kept_by(loss)}
    yield
    now = dict(_kept_by(loss))
    changed = [name for name, (_, state) in before.items() if name in now and state_of(now[name]) != state]
    if changed:
        warnings.warn(
            f"the loss {name_of(loss)} changes {', '.join(map(repr, changed))}, which every one of {replicas} replicas "
            "does, and more often than there are steps; what its value depends on is changed by a callback, in "
            "on_train_batch_begin",
            stacklevel=3,
        )


def _kept_by(loss: Any) -> Iterator[tuple[str, Any]]:
    """By name, what the function has captured, or what is kept in a module or a part of it."""
    yield from captured_by(loss)
    if isinstance(loss, nn.Module):
        for path, part in loss.named_modules():
            kept = {**vars(part), **part._buffers}
            for name, value in kept.items():
                if type(value) in (int, float) or (name in part._buffers and value is not None):
                    yield f"{path}.{name}" if path else name, value if type(value) in (int, float) else id(value)
