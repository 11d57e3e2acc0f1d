"""Finds the total and the count of a loss that returns one scalar, by tracing how the scalar is computed.

    loss(outputs, targets) -> F.cross_entropy(...)         total of the losses, count of the labels that count
                           -> losses.sum() / mask.sum()    the two sides of the division
                           -> losses[mask].mean()          the total, and how many were selected
                           -> anything else                a scalar: the mean over the rows

The mean over a shard is not enough: shards are added up by their counts, which differ with ignored labels, class
weights and masks. torch's losses are found wherever they are called. Nothing here knows of replicas.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep._torch_compat import functorch_interpreter, saved_tensors_hooks
from lockstep.errors import ConfigError
from lockstep.replicas.rng.function_mode import restore_l1_weight

Pair = tuple[Tensor, Any]
"""A total, and its count."""
T = TypeVar("T")


class _TensorNotes(dict[int, tuple[Tensor, int, T]]):
    """By the id of a tensor, a value that is valid until the tensor is changed in place."""

    def note(self, tensor: Any, value: T) -> None:
        # The tensor is held: otherwise another one could get its id, and its note with it.
        self[id(tensor)] = (tensor, _version(tensor), value)

    def of(self, tensor: Any) -> T | None:
        note = self.get(id(tensor))
        return None if note is None or _version(tensor) != note[1] else note[2]


class _Call(NamedTuple):
    """A call of one of torch's functions."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def first(self) -> Any:
        """The tensor that it was called for."""
        return self.args[0]

    @property
    def is_of_one_number(self) -> bool:
        first = self.args[0]
        return isinstance(first, Tensor) and not first.dim()


class ReductionTracer(TorchFunctionMode):
    """A block that calls a loss function once. Then ``pair_of`` and ``sum_of`` say how its result was computed.

    In the block torch's mean losses are computed as their sum divided by their count, with the same results.
    ``label_means`` are the means over labels that were computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pairs: _TensorNotes[Pair] = _TensorNotes()
        self._sums: _TensorNotes[str] = _TensorNotes()
        self._of_nothing: _TensorNotes[bool] = _TensorNotes()
        self._unclamped: _TensorNotes[Tensor] = _TensorNotes()
        self._reads: set[float] = set()
        self.label_means: list[LabelMean] = []
        self._masked = False
        self._hooks = saved_tensors_hooks(True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, is_loss, note = kwargs or {}, func in _PARAMETERS, _NOTED.get(func)
        if is_loss:
            kwargs = restore_l1_weight(func, kwargs)
        elif note is None:
            return func(*args, **kwargs)
        traced = saved_tensors_hooks(True) is self._hooks  # activation checkpointing calls it again in backward
        if functorch_interpreter() is not None:  # vmap: tensors of one row
            return func(*args, **kwargs)
        if is_loss:
            return self._loss(func, args, kwargs, traced=traced)
        if note is None or not traced:
            return func(*args, **kwargs)
        func = _OUT_OF_PLACE.get(func, func)
        if not args:  # torch.sum(input=losses)
            args = (kwargs.pop("input"),)
        result = func(*args, **kwargs)
        note(self, result, _Call(func, args, kwargs))
        return result

    def pair_of(self, returned: Tensor) -> Pair | None:
        """The total and the count of a scalar; None if it is not a quotient that was traced."""
        return self._pairs.of(returned)

    def sum_of(self, returned: Tensor) -> str | None:
        """The name of torch's loss whose sum ``returned`` is; None if it is not such a sum."""
        return self._sums.of(returned) or None

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, traced: bool) -> Any:
        arguments = dict(zip(_PARAMETERS[func], args, strict=False)) | kwargs
        reduction = _reduction(arguments)
        if reduction == "mean" and func in _OF_LABELS and not _are_probabilities(arguments):
            self.label_means.append(LabelMean.of(arguments))
        if reduction not in ("mean", "batchmean") or not traced:
            result = func(*args, **kwargs)
            if reduction == "sum" and traced:
                self._note_sum(result, f'{func.__name__}(reduction="sum")', next(iter(arguments.values())))
            return result
        total, count = _SUMMED.get(func, _values_summed)(func, arguments)
        result = total / count
        self._pairs.note(result, (total, count))
        return result

    def _note_sum(self, result: Tensor, of: str, values: Any) -> None:
        self._sums.note(result, of)
        if isinstance(values, Tensor) and not values.numel():
            self._of_nothing.note(result, True)

    def _sum(self, result: Tensor, call: _Call) -> None:
        if call.is_of_one_number:
            self._linear(result, call)
        elif not result.dim():
            self._note_sum(result, "", call.first)

    def _mean(self, result: Tensor, call: _Call) -> None:
        if call.is_of_one_number:
            self._linear(result, call)
        elif self._masked and len(call.args) == 1 and not call.kwargs:
            selected, *rest = call.first.shape
            self._pairs.note(result, (call.first.sum() / max(math.prod(rest), 1), float(selected)))

    def _scaled(self, result: Tensor, call: _Call) -> None:
        if all(isinstance(number, (int, float)) for number in call.args[1:]):
            self._linear(result, call)

    def _linear(self, result: Tensor, call: _Call) -> None:
        """A cast, a copy or a reshape of one number, or its product with a number."""
        if result is call.first:
            return
        pair, summed = self._pairs.of(call.first), self._sums.of(call.first)
        if pair is not None:
            self._pairs.note(result, (call.func(pair[0], *call.args[1:], **call.kwargs), pair[1]))
        elif summed is not None:
            self._sums.note(result, summed)

    def _added(self, result: Tensor, call: _Call) -> None:
        if len(call.args) == 2 and not call.kwargs:
            first, second = map(self._sums.of, call.args)
            if first is not None and second is not None:
                self._sums.note(result, first or second)

    def _quotient(self, result: Tensor, call: _Call) -> None:
        if len(call.args) != 2 or call.kwargs:
            return
        total, count = call.args
        if self._sums.of(total) is None:
            self._scaled(result, call)
        elif isinstance(count, Tensor) and count.numel() == 1:
            unclamped = self._unclamped.of(count)
            self._pairs.note(result, (total, count if unclamped is None else unclamped))
        elif isinstance(count, (int, float)) and (self._masked or self._reads):
            self._pairs.note(result, (total, self._counted(total, count)))
        # Otherwise divided by the rows or a constant, which the check of its parts tells apart.

    def _counted(self, total: Tensor, count: float) -> float:
        """The number that a sum was divided by; 0 if ``max(int(mask.sum()), 1)`` or the like kept it from being 0."""
        nothing = bool(self._of_nothing.of(total)) or (0 in self._reads and not total.detach().any())
        return 0.0 if nothing and count <= 1 else float(count)

    def _read(self, result: float, call: _Call) -> None:
        self._reads.add(result)

    def _clamp(self, result: Tensor, call: _Call) -> None:
        """A minimum of at most 1, which keeps a count from being 0, is left out of the count over all replicas."""
        least = call.args[1] if len(call.args) == 2 else call.kwargs.get("min")
        if isinstance(least, (int, float)) and least <= 1 and call.kwargs.get("max") is None and result.numel() == 1:
            self._unclamped.note(result, call.first)

    def _choice(self, result: Tensor, call: _Call) -> None:
        """A selection by index or mask: the number of values depends on the data."""
        index = call.args[-1] if len(call.args) > 1 else next(iter(call.kwargs.values()), None)
        parts = index if isinstance(index, tuple) else (index,)
        self._masked = self._masked or any(isinstance(part, Tensor) for part in parts)


@dataclass(frozen=True, slots=True)
class LabelMean:
    """The labels that a mean was taken over: class numbers, weights of the classes, and the label that is ignored."""

    target: Tensor
    weight: Tensor | None
    ignored: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> LabelMean:
        """The labels of a call of a loss."""
        ignored = arguments.get("ignore_index", -100)
        return cls(arguments["target"], arguments.get("weight"), -100 if ignored is None else int(ignored))

    def counts_rows(self) -> bool:
        """Whether all labels count alike, so that the mean is one over rows. Waits for the device."""
        if bool((self.target == self.ignored).any()):
            return False
        if self.weight is None or not self.target.numel():
            return True
        weights = self.weight[self.target]
        return bool(weights.min() == weights.max())

    def count(self) -> Tensor:
        """What torch divides by: the number of labels that are not ignored, or the sum of their class weights."""
        counted = self.target != self.ignored
        if self.weight is None:
            return counted.sum()
        weights: Tensor = self.weight[self.target.where(counted, 0)] * counted
        return weights.sum()


def mean_as_pair(func: Callable[..., Any], input: Tensor, target: Tensor) -> Pair | None:
    """The total and the count of one of torch's mean losses of two tensors; None if ``func`` is not known as one.

    The tracer has the same of a loss that is called in a function of the program's.
    """
    names = _PARAMETERS.get(func)
    if names is None:
        return None
    return _SUMMED.get(func, _values_summed)(func, {names[0]: input, names[1]: target})


def _values_summed(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Pair:
    values = func(**{**arguments, "reduction": "none"})
    return _sum_exactly(values), float(values.numel())


def _weighted_values_summed(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Pair:
    weight = arguments.get("weight")
    total, count = _values_summed(func, arguments)
    return total, count if weight is None else weight.sum()


def _rows_summed(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Pair:
    """KLDivLoss: "batchmean" divides by the rows, "mean" by the values."""
    total, count = _values_summed(func, arguments)
    return total, count if _reduction(arguments) == "mean" else float(arguments["input"].shape[0])


def _sequences_summed(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Pair:
    """CTCLoss: each sequence divided by its length."""
    values = func(**{**arguments, "reduction": "none"})
    lengths = torch.as_tensor(arguments["target_lengths"], device=values.device).clamp(min=1)
    return _sum_exactly(values / lengths), float(values.numel())


def _labels_summed(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Pair:
    arguments = {**arguments, "reduction": "sum"}
    # The largest float16 is 65504: a sum over some thousand labels would be infinite.
    if arguments["input"].dtype in (torch.float16, torch.bfloat16):
        arguments["input"] = arguments["input"].float()
        if isinstance(arguments.get("weight"), Tensor):
            arguments["weight"] = arguments["weight"].float()
    total = func(**arguments)
    if _are_probabilities(arguments):
        classes = arguments["input"].shape[1 if arguments["input"].dim() > 1 else 0]
        return total, arguments["input"].numel() / classes
    return total, LabelMean.of(arguments).count()


def _are_probabilities(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["target"].is_floating_point())


def _sum_exactly(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32) if values.dtype in (torch.float16, torch.bfloat16) else values.sum()


def _version(tensor: Tensor) -> int:
    # torch raises an error for the version of an inference tensor.
    return -1 if tensor.is_inference() else tensor._version


def _reduction(arguments: Mapping[str, Any]) -> str:
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise ConfigError("the loss gives torch size_average= or reduce=, which are deprecated; give it reduction=")
    return str(arguments.get("reduction", "mean"))


_OF_LABELS = frozenset([F.cross_entropy, F.nll_loss])
_LOSSES: tuple[Callable[..., Any], ...] = (
    *_OF_LABELS,
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss, F.smooth_l1_loss),
    *(F.huber_loss, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.margin_ranking_loss, F.soft_margin_loss),
    *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.hinge_embedding_loss),
    *(F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss, F.ctc_loss),
)
_PARAMETERS = {loss: tuple(inspect.signature(loss).parameters) for loss in _LOSSES}
_SUMMED: dict[Any, Callable[[Callable[..., Any], Mapping[str, Any]], Pair]] = {
    **dict.fromkeys(_OF_LABELS, _labels_summed),
    F.mse_loss: _weighted_values_summed,
    F.l1_loss: _weighted_values_summed,
    F.kl_div: _rows_summed,
    F.ctc_loss: _sequences_summed,
}
# ``total /= count`` would change the total that was noted. As ``total / count`` it stays, and the result is the same.
_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {Tensor.__itruediv__: Tensor.__truediv__}
_NOTED: dict[Any, Callable[[ReductionTracer, Any, _Call], None]] = {
    **dict.fromkeys([torch.sum, Tensor.sum], ReductionTracer._sum),
    **dict.fromkeys([torch.mean, Tensor.mean], ReductionTracer._mean),
    **dict.fromkeys([torch.div, torch.true_divide, Tensor.div, Tensor.true_divide], ReductionTracer._quotient),
    **dict.fromkeys([Tensor.__truediv__, Tensor.__itruediv__], ReductionTracer._quotient),
    **dict.fromkeys([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__], ReductionTracer._scaled),
    **dict.fromkeys([torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__], ReductionTracer._scaled),
    **dict.fromkeys([Tensor.float, Tensor.double, Tensor.to, Tensor.clone, torch.clone], ReductionTracer._linear),
    **dict.fromkeys([Tensor.detach, torch.detach], ReductionTracer._linear),
    **dict.fromkeys([Tensor.squeeze, torch.squeeze, Tensor.reshape, Tensor.view], ReductionTracer._linear),
    **dict.fromkeys([torch.add, Tensor.add, Tensor.__add__], ReductionTracer._added),
    **dict.fromkeys([torch.clamp, torch.clip, torch.clamp_min], ReductionTracer._clamp),
    **dict.fromkeys([Tensor.clamp, Tensor.clip, Tensor.clamp_min], ReductionTracer._clamp),
    **dict.fromkeys([Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__], ReductionTracer._read),
    **dict.fromkeys([torch.masked_select, Tensor.masked_select, Tensor.__getitem__], ReductionTracer._choice),
    **dict.fromkeys([torch.index_select, Tensor.index_select], ReductionTracer._choice),
}
