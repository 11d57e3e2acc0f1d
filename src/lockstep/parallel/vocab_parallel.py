"""Logits that stay divided along the vocabulary among tensor ranks (as in Megatron-LM; Shoeybi et al. 2019).

    head -> shard [.., own vocabulary]     cross-entropy, argmax, views, casts: on shards, few numbers a token are sent
                                           anything else: all-gathered, and from then on a plain tensor

So a loss that was written for one device is computed without gathering, and other code sees whole logits. All tensor
ranks run the same program, so all of them reach the same all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep import _torch_compat as compat
from lockstep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """A tensor rank's range of a vocabulary of ``size`` tokens. Ranges are equal, the last ones shorter or empty."""

    size: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    @property
    def most(self) -> int:
        """The size of the largest range."""
        return -(-self.size // self.ranks)

    @property
    def begin(self) -> int:
        """The first token id of this rank."""
        return min(self.rank * self.most, self.size)

    @property
    def own(self) -> int:
        """The size of this rank's range."""
        return min(self.most, self.size - self.begin)

    def cut(self, logits: Tensor, dim: int) -> Tensor:
        """This rank's part of whole logits, with the vocabulary along ``dim``."""
        return logits.narrow(dim, self.begin, self.own)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All-gathers the logits, without autograd. All ranks must call it."""
        first = part.detach().movedim(dim, 0)
        padded = first.new_zeros(self.most, *first.shape[1:])
        padded[: self.own] = first
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        if padded.numel():
            dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([each.movedim(0, dim) for each in parts], dim)
        return whole.narrow(dim, 0, self.size).contiguous()  # the padding is at the end

    def reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if values.numel():
            dist.all_reduce(values, op, group=self.group)
        return values


def cross_entropy(
    part: Tensor,
    targets: Tensor,
    vocabulary: VocabShard,
    dim: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of divided logits, with the same bits on all ranks. All must call it, with the same targets.

    Args:
        part: this rank's logits, floating-point, with its range of the vocabulary along ``dim``.
        targets: token ids, int64, with the shape of ``part`` without ``dim``.
        vocabulary: the range of this rank.
        dim: the dimension of the vocabulary.
        weight: see F.cross_entropy; not together with ``label_smoothing``.
        ignore_index: see F.cross_entropy, as for the following.
        reduction: "none", "sum" or "mean".
        label_smoothing: the fraction of the target that is spread over the vocabulary.

    Raises:
        IndexError: a target is not in the vocabulary.
    """
    counts = targets != ignore_index
    _check(targets, counts, vocabulary.size)
    known = torch.where(counts, targets, 0)
    spread, picked, total = _Sums.apply(part, known, vocabulary, dim, label_smoothing > 0)  # type: ignore[no-untyped-call]
    values: Tensor = spread - picked
    if label_smoothing > 0:
        values = (1 - label_smoothing) * values + label_smoothing * (spread - total / vocabulary.size)
    weights = counts.to(values.dtype) if weight is None else torch.where(counts, weight[known], 0).to(values.dtype)
    values = torch.where(counts, values * weights, 0)
    if part.dtype != values.dtype and not torch.is_autocast_enabled(part.device.type):
        values = values.to(part.dtype)
    if reduction == "none":
        return values
    return values.sum() / weights.sum() if reduction == "mean" else values.sum()


def argmax(part: Tensor, vocabulary: VocabShard, dim: int, *, keepdim: bool = False) -> Tensor:
    """The token id with the largest logit, the first of equal ones; see ``cross_entropy``. All ranks must call it."""
    logits = part.detach()
    # A rank with an empty range contributes -inf, which never wins: earlier ranks win ties.
    best, token = (logits if vocabulary.own else _lowest(logits, dim)).max(dim)
    found = torch.stack([best.double(), (token + vocabulary.begin).double()])  # exact for every logit and token id
    every = [torch.empty_like(found) for _ in range(vocabulary.ranks)]
    if found.numel():
        dist.all_gather(every, found, group=vocabulary.group)
    largest, tokens = torch.stack(every).unbind(1)
    chosen: Tensor = tokens.gather(0, largest.argmax(0, keepdim=True))[0].long()
    return chosen.unsqueeze(dim) if keepdim else chosen


class _Sums(torch.autograd.Function):
    """Per token, after subtracting the largest logit: logsumexp, the target's logit, and the sum of all logits."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, targets: Tensor, vocabulary: VocabShard, dim: int, with_total: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.autocast(part.device.type, enabled=False):
            logits = part if part.dtype in (torch.float32, torch.float64) else part.float()
            shifted = logits - _largest(logits, vocabulary, dim)
            place = (targets - vocabulary.begin).unsqueeze(dim)
            here = (place >= 0) & (place < vocabulary.own)
            place = torch.where(here, place, 0)
            zero = shifted.new_zeros(())
            picked = torch.where(here, shifted.gather(dim, place), zero) if vocabulary.own else zero.expand_as(place)
            total = [shifted.sum(dim, keepdim=True)] if with_total else []
            powers = shifted.exp_()
            sums = vocabulary.reduce(torch.stack([powers.sum(dim, keepdim=True), picked, *total]))
            softmax = powers.div_(sums[0])
        ctx.save_for_backward(softmax, place, here)
        ctx.dim, ctx.dtype, ctx.owns_any = dim, part.dtype, vocabulary.own > 0
        found = [sums[0].log(), *sums[1:]]
        spread, chosen, *rest = (each.squeeze(dim) for each in found)
        return spread, chosen, rest[0] if rest else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_spread: Tensor, to_picked: Tensor, to_total: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        softmax, place, here = ctx.saved_tensors
        gradient = softmax * to_spread.unsqueeze(ctx.dim)
        if to_total is not None:
            gradient += to_total.unsqueeze(ctx.dim)
        if ctx.owns_any:
            gradient.scatter_add_(ctx.dim, place, torch.where(here, to_picked.unsqueeze(ctx.dim), 0))
        return gradient.to(ctx.dtype), None, None, None, None


def _largest(logits: Tensor, vocabulary: VocabShard, dim: int) -> Tensor:
    largest = (logits if vocabulary.own else _lowest(logits, dim)).amax(dim, keepdim=True)
    return vocabulary.reduce(largest, dist.ReduceOp.MAX)


def _lowest(logits: Tensor, dim: int) -> Tensor:
    return logits.new_full([*logits.shape[:dim], 1, *logits.shape[dim + 1 :]], -torch.inf)


def _check(targets: Tensor, counts: Tensor, size: int) -> None:
    if targets.is_cuda:  # as F.cross_entropy: the host does not wait for the device
        compat.assert_async((~counts | ((targets >= 0) & (targets < size))).all())
        return
    wrong = targets[counts & ((targets < 0) | (targets >= size))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")  # F.cross_entropy's message


_may_stay_divided: ContextVar[bool] = ContextVar("lockstep_logits_may_stay_divided", default=False)
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")
_HOOKS = frozenset(["register_hook", "retain_grad"])
_CHANGES = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])


@contextmanager
def keep_logits_sharded() -> Iterator[None]:
    """A block in which logits may stay divided. Elsewhere they are gathered at once, since user code sees them."""
    token = _may_stay_divided.set(True)
    try:
        yield
    finally:
        _may_stay_divided.reset(token)


def vocab_parallel_logits(part: Tensor, vocabulary: VocabShard) -> Tensor:
    """The whole logits, divided or gathered, of this rank's ``part`` [.., own range]. All ranks must call it."""
    dim = part.ndim - 1
    return _divided(part, vocabulary, dim, [0, 0]) if _may_stay_divided.get() else _gathered(part, vocabulary, dim)


class VocabParallelLogits(Tensor):
    """A tensor with the shape of the whole logits that holds this rank's part. Made by ``vocab_parallel_logits``.

    Autograd records operations on parts on the part, and operations that bypass ``__torch_function__`` on this tensor.
    In both cases the part gets its gradient.

    Attributes:
        part: this rank's logits.
        vocabulary: the range of this rank.
        vocab_dim: the dimension of the vocabulary.
        counts: the number of views of one tensor and the number of their uses; all views share the list.
        known_whole: the gathered logits, once they have been gathered.
    """

    part: Tensor
    vocabulary: VocabShard
    vocab_dim: int
    counts: list[int]
    known_whole: Tensor | None

    @staticmethod
    def over(part: Tensor, vocabulary: VocabShard, dim: int, counts: list[int]) -> VocabParallelLogits:
        """Makes a tensor with the whole shape and no memory of its own."""
        sizes = [*part.shape[:dim], vocabulary.size, *part.shape[dim + 1 :]]
        made: VocabParallelLogits
        made = compat.make_wrapper_subclass(VocabParallelLogits, sizes, dtype=part.dtype, device=part.device)
        made.part, made.vocabulary, made.vocab_dim, made.counts, made.known_whole = part, vocabulary, dim, counts, None
        return made

    @property
    def divided(self) -> bool:
        """Whether the logits have not been gathered yet."""
        return self.known_whole is None

    def whole(self) -> Tensor:
        """The gathered logits as a plain tensor, the same one at each call. All ranks must call it."""
        if self.known_whole is None:
            with torch.enable_grad():  # as for the part, independent of the first caller's mode
                self.known_whole = _gathered(self.part, self.vocabulary, self.vocab_dim)
        return self.known_whole

    def values(self) -> Tensor:
        if self.known_whole is not None:
            return self.known_whole.detach()
        return self.vocabulary.gather(self.part, self.vocab_dim)

    def with_part(self, part: Tensor, dim: int, *, view: bool) -> VocabParallelLogits:
        """Logits of the same range with another part, which may be a view of this one."""
        if not view:
            return _divided(part, self.vocabulary, dim, [0, 0])
        self.counts[0] += 1
        return _divided(part, self.vocabulary, dim, self.counts)

    def detach_logits(self) -> VocabParallelLogits:
        """``detach_``, which a pipeline calls after a microbatch."""
        self.part = self.part.detach()
        if self.known_whole is not None:
            self.known_whole = self.known_whole.detach()
        with compat.DisableTorchFunctionSubclass():
            self.detach_()
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _ABOUT_THE_SHAPE:
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **given)
        on_parts = _ON_PARTS.get(func)
        if on_parts is not None and args and isinstance(args[0], VocabParallelLogits) and args[0].divided:
            result = on_parts(func, *args, **given)
            if result is not NotImplemented:
                args[0].counts[1] += func not in _LEAVES_NO_TRACE and result is not args[0]
                return result
        if func is Tensor.detach_:
            return args[0].detach_logits()
        _refuse_late_changes(getattr(func, "__name__", ""), args)
        return func(*gather_logits(args), **gather_logits(given))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out the function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Operators below autograd, such as those in a user's torch.autograd.Function."""
        if func is torch.ops.aten.detach.default:
            logits = args[0]
            if not logits.divided:
                return logits.values()
            return VocabParallelLogits.over(logits.part.detach(), logits.vocabulary, logits.vocab_dim, [0, 0])
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments):
            raise UsageError(_NO_CHANGE)
        args, given = compat.tree_map(
            lambda leaf: leaf.values() if isinstance(leaf, VocabParallelLogits) else leaf, (args, dict(kwargs or {}))
        )
        return func(*args, **given)


class _Whole(torch.autograd.Function):
    """A part as the whole logits, gathered or divided; backwards, this rank's range of the gradient.

    All ranks compute the same from gathered logits, so each has the whole gradient, without a reduction.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: VocabShard, dim: int, gathered: bool) -> Tensor:
        ctx.vocabulary, ctx.dim = vocabulary, dim
        return vocabulary.gather(part, dim) if gathered else VocabParallelLogits.over(part, vocabulary, dim, [0, 0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.vocabulary.cut(gradient, ctx.dim), None, None, None


def _gathered(part: Tensor, vocabulary: VocabShard, dim: int) -> Tensor:
    whole: Tensor = _Whole.apply(part, vocabulary, dim, True)  # type: ignore[no-untyped-call]
    return whole


def _divided(part: Tensor, vocabulary: VocabShard, dim: int, counts: list[int]) -> VocabParallelLogits:
    made: VocabParallelLogits = _Whole.apply(part, vocabulary, dim, False)  # type: ignore[no-untyped-call]
    made.part, made.counts = part, counts  # the part with its autograd history, which a Function's forward does not see
    return made


def has_sharded_logits(values: Any) -> bool:
    """Whether any of the values are divided logits."""
    return any(isinstance(leaf, VocabParallelLogits) for leaf in compat.tree_leaves(values))


def gather_logits(values: Any) -> Any:
    """The same structure with all logits gathered. All ranks must call it."""
    return compat.tree_map(lambda leaf: leaf.whole() if isinstance(leaf, VocabParallelLogits) else leaf, values)


_NO_CHANGE = (
    "logits that are divided among workers were changed in place through a view of them; clone() the logits before "
    "changing them"
)
_NO_HOOK = (
    "{} was called on logits that are divided among workers after they had been used, where it would not see their "
    "gradient; call it right after the forward pass"
)


def _refuse_late_changes(name: str, args: tuple[Any, ...]) -> None:
    """Refuses changes and hooks that would not affect what has been computed on parts."""
    views, uses = args[0].counts if args and isinstance(args[0], VocabParallelLogits) else (0, 0)
    if views and (name in _CHANGES or (name.endswith("_") and not name.endswith("__"))):
        raise UsageError(_NO_CHANGE)
    if uses and name in _HOOKS:
        raise UsageError(_NO_HOOK.format(name))


# Functions that run on parts. Each takes torch's function and its arguments, and may return NotImplemented.


def _cast(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    part = func(logits.part, *args, **kwargs)
    return logits if part is logits.part else logits.with_part(part, logits.vocab_dim, view=False)


def _permuted(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    numbered = torch.empty(tuple(range(1, logits.ndim + 1)), device="meta")  # its sizes identify its dimensions
    dim = list(func(numbered, *args, **kwargs).shape).index(logits.vocab_dim + 1)
    return logits.with_part(func(logits.part, *args, **kwargs), dim, view=True)


def _reshaped(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Reshapes that keep the vocabulary as the last dimension."""
    if logits.vocab_dim != logits.ndim - 1 or any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    size = logits.vocabulary.size
    if not shape or shape[-1] != size or size == 1:
        return NotImplemented
    part = logits.part.reshape(*shape[:-1], logits.vocabulary.own)
    return logits.with_part(part, part.ndim - 1, view=True)


def _indexed(func: Any, logits: VocabParallelLogits, index: Any) -> Any:
    """An index into the dimensions before the vocabulary's."""
    parts = index if isinstance(index, tuple) else (index,)
    if logits.vocab_dim != logits.ndim - 1 or not all(_is_index(each) for each in parts):
        return NotImplemented
    used = sum(_dims_of(each) for each in parts)
    whole_vocabulary = isinstance(parts[-1], slice) and parts[-1] == slice(None) if parts else False
    open_end = parts and parts[-1] is Ellipsis
    behind = any(each is Ellipsis for each in parts) and not open_end
    if (used >= logits.ndim or behind) and not whole_vocabulary:
        return NotImplemented
    part = func(logits.part, index)
    return logits.with_part(part, part.ndim - 1, view=True)


def _is_index(each: Any) -> bool:
    if isinstance(each, Tensor):
        return type(each) is Tensor and not each.is_floating_point()
    return each is None or each is Ellipsis or (isinstance(each, (int, slice)) and not isinstance(each, bool))


def _dims_of(each: Any) -> int:
    if each is None or each is Ellipsis:
        return 0
    return each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1


def _argmax(func: Any, logits: VocabParallelLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % logits.ndim != logits.vocab_dim:
        return NotImplemented
    return argmax(logits.part, logits.vocabulary, logits.vocab_dim, keepdim=keepdim)


def _cross_entropy(
    func: Any,
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes = 1 if logits.ndim > 1 else 0
    shape = [*logits.shape[:classes], *logits.shape[classes + 1 :]]
    plain = type(target) is Tensor and target.dtype == torch.long and list(target.shape) == shape
    usual = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if logits.vocab_dim != classes or not plain or not usual or (weight is not None and label_smoothing > 0):
        return NotImplemented
    return cross_entropy(
        logits.part, target, logits.vocabulary, classes,
        weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip


def _hooked(func: Any, logits: VocabParallelLogits, hook: Any) -> Any:
    """Registers FSDP's hook, which only has to run when the backward pass reaches the logits, on the part.

    With logits gathered for it, 4 sequences of 128 tokens took 128 MB instead of 48 (vocabulary of 16,384).
    """
    return func(logits.part, hook) if compat.is_fsdp_hook(hook) else NotImplemented


_ABOUT_THE_SHAPE = frozenset(
    [
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__),  # type: ignore[attr-defined]
        *(Tensor.layout.__get__, Tensor.requires_grad.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__),  # type: ignore[attr-defined]
        compat.GET_BASE,
        *(Tensor.size, Tensor.dim, Tensor.numel, torch.numel, Tensor.__len__),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    ]
)
_LEAVES_NO_TRACE = frozenset([Tensor.argmax, torch.argmax, Tensor.detach, torch.detach, Tensor.register_hook])
"""Functions that record nothing for autograd."""
_ON_PARTS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _indexed,
    Tensor.register_hook: _hooked,
    **dict.fromkeys([Tensor.argmax, torch.argmax], _argmax),
    **dict.fromkeys([Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to], _cast),
    **dict.fromkeys([Tensor.detach, torch.detach, Tensor.clone, torch.clone, Tensor.contiguous], _cast),
    **dict.fromkeys([Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim], _permuted),
    **dict.fromkeys([Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten], _reshaped),
    **dict.fromkeys([Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze], _reshaped),
}
