"""The scores of all words as one tensor, of which each tensor rank holds the part of its own words.

    head -> part [.., own words]     cross-entropy, argmax, views, casts: on the parts, few numbers a token are sent
                                     anything else: gathered, and from then on a plain tensor for all that comes

So the loss that the user wrote for one device is computed without gathering, and whatever else looks at the scores
finds them whole. What runs on one tensor rank runs on all, and so they meet where they gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep._torch_compat import (
    GET_BASE,
    DisableTorchFunctionSubclass,
    assert_async,
    is_fsdp_hook,
    make_wrapper_subclass,
    tree_leaves,
    tree_map,
)
from lockstep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which words' scores a tensor rank has: equal runs in the order of the ranks, the last ones shorter or empty.

    Args:
        words: how many there are.
        rank: of this worker.
        ranks: how many workers divide them.
        group: these workers.
    """

    words: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    @property
    def most(self) -> int:
        """The words of a rank that has most."""
        return -(-self.words // self.ranks)

    @property
    def begin(self) -> int:
        """The first of this rank's words."""
        return min(self.rank * self.most, self.words)

    @property
    def own(self) -> int:
        """How many words this rank has."""
        return min(self.most, self.words - self.begin)

    def cut(self, scores: Tensor, dim: int) -> Tensor:
        """This rank's part of the scores of all words, which lie along ``dim``."""
        return scores.narrow(dim, self.begin, self.own)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The scores of all words, on every rank. All ranks must call it; autograd does not see it."""
        first = part.detach().movedim(dim, 0)
        padded = first.new_zeros(self.most, *first.shape[1:])
        padded[: self.own] = first
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        if padded.numel():
            dist.all_gather(parts, padded, group=self.group)
        begins = [min(rank * self.most, self.words) for rank in range(self.ranks + 1)]
        lengths = [end - begin for begin, end in pairwise(begins)]
        return torch.cat([each[:own].movedim(0, dim) for each, own in zip(parts, lengths, strict=True)], dim)

    def reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum, or what ``op`` is, of all ranks' values, in their place. All ranks must call it."""
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
    """``F.cross_entropy`` of the scores of all words. All ranks must call it, with the same targets.

    Args:
        part: floating, this rank's scores, along ``dim``.
        targets: int64, of the same shape without ``dim``.
        vocabulary: whose part it is.
        dim: of the words.
        weight: of each word, [words]; not beside ``label_smoothing``.
        ignore_index: the target that does not count.
        reduction: "none", "sum" or "mean".
        label_smoothing: how much of the target is spread over all words.

    Returns:
        As F.cross_entropy does, and the same bits on all ranks.

    Raises:
        IndexError: a target that is no word.
    """
    counts = targets != ignore_index
    _check(targets, counts, vocabulary.words)
    known = torch.where(counts, targets, 0)
    sums = _Sums.apply(part, known, vocabulary, dim, label_smoothing > 0)  # type: ignore[no-untyped-call]
    spread, picked, total = sums
    values: Tensor = spread - picked
    if label_smoothing > 0:
        values = (1 - label_smoothing) * values + label_smoothing * (spread - total / vocabulary.words)
    weights = counts.to(values.dtype) if weight is None else torch.where(counts, weight[known], 0).to(values.dtype)
    values = torch.where(counts, values * weights, 0)
    if part.dtype != values.dtype and not torch.is_autocast_enabled(part.device.type):
        values = values.to(part.dtype)
    if reduction == "none":
        return values
    return values.sum() / weights.sum() if reduction == "mean" else values.sum()


def argmax(part: Tensor, vocabulary: VocabShard, dim: int, *, keepdim: bool = False) -> Tensor:
    """The word with the largest score, the first of equal ones. All ranks must call it.

    Args:
        part: this rank's scores, along ``dim``.
        vocabulary: whose part it is.
        dim: of the words.
        keepdim: whether ``dim`` stays, with length 1.
    """
    scores = part.detach()
    # A rank without words has a lowest score, which is no earlier rank's largest.
    best, word = (scores if vocabulary.own else _lowest(scores, dim)).max(dim)
    found = torch.stack([best.double(), (word + vocabulary.begin).double()])  # exact for every score and number
    every = [torch.empty_like(found) for _ in range(vocabulary.ranks)]
    if found.numel():
        dist.all_gather(every, found, group=vocabulary.group)
    largest, words = torch.stack(every).unbind(1)
    chosen: Tensor = words.gather(0, largest.argmax(0, keepdim=True))[0].long()
    return chosen.unsqueeze(dim) if keepdim else chosen


class _Sums(torch.autograd.Function):
    """For each token, less the largest score: log of the sum of exp, the target's score, the sum of all scores."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, targets: Tensor, vocabulary: VocabShard, dim: int, with_total: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.autocast(part.device.type, enabled=False):
            scores = part if part.dtype in (torch.float32, torch.float64) else part.float()
            shifted = scores - _largest(scores, vocabulary, dim)
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
        ctx.dim, ctx.dtype, ctx.has_words = dim, part.dtype, vocabulary.own > 0
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
        if ctx.has_words:
            gradient.scatter_add_(ctx.dim, place, torch.where(here, to_picked.unsqueeze(ctx.dim), 0))
        return gradient.to(ctx.dtype), None, None, None, None


def _largest(scores: Tensor, vocabulary: VocabShard, dim: int) -> Tensor:
    largest = (scores if vocabulary.own else _lowest(scores, dim)).amax(dim, keepdim=True)
    return vocabulary.reduce(largest, dist.ReduceOp.MAX)


def _lowest(scores: Tensor, dim: int) -> Tensor:
    return scores.new_full([*scores.shape[:dim], 1, *scores.shape[dim + 1 :]], -torch.inf)


def _check(targets: Tensor, counts: Tensor, words: int) -> None:
    if targets.is_cuda:  # as F.cross_entropy there: the host does not wait for the answer
        assert_async((~counts | ((targets >= 0) & (targets < words))).all())
        return
    wrong = targets[counts & ((targets < 0) | (targets >= words))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")  # what F.cross_entropy says


_may_stay_divided: ContextVar[bool] = ContextVar("lockstep_scores_may_stay_divided", default=False)
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")
_HOOKS = frozenset(["register_hook", "retain_grad"])
_CHANGES = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])


@contextmanager
def keep_logits_sharded() -> Iterator[None]:
    """A block whose caller lets no scores out of it; elsewhere they are gathered as soon as they are there."""
    token = _may_stay_divided.set(True)
    try:
        yield
    finally:
        _may_stay_divided.reset(token)


def vocab_parallel_logits(part: Tensor, vocabulary: VocabShard) -> Tensor:
    """The scores of all words. All ranks must call it.

    Args:
        part: [.., own words], this rank's.
        vocabulary: whose part it is.
    """
    dim = part.ndim - 1
    if _may_stay_divided.get():
        return _divided(part, vocabulary, dim, [0, 0])
    whole: Tensor = _Gathered.apply(part, vocabulary, dim)  # type: ignore[no-untyped-call]
    return whole


class VocabParallelLogits(Tensor):
    """A tensor of the whole shape over this rank's part. Made by ``vocab_parallel_logits``.

    Autograd sees the part where an operation is made on parts, and this tensor where one reaches it past
    ``__torch_function__``; either way the gradient of the part is right.
    """

    part: Tensor
    vocabulary: VocabShard
    words_dim: int
    family: list[int]
    known_whole: Tensor | None

    @staticmethod
    def over(part: Tensor, vocabulary: VocabShard, dim: int, family: list[int]) -> VocabParallelLogits:
        """A tensor of the whole shape without memory of its own.

        Args:
            part: this rank's.
            vocabulary: whose part it is.
            dim: of the words.
            family: how many views there are of one tensor, and how often these were used; each has the same list.
        """
        sizes = [*part.shape[:dim], vocabulary.words, *part.shape[dim + 1 :]]
        made: VocabParallelLogits = make_wrapper_subclass(
            VocabParallelLogits, sizes, dtype=part.dtype, device=part.device
        )
        made.part, made.vocabulary, made.words_dim, made.family, made.known_whole = part, vocabulary, dim, family, None
        return made

    @property
    def divided(self) -> bool:
        """Whether nothing has asked for the whole so far."""
        return self.known_whole is None

    def whole(self) -> Tensor:
        """The scores as a plain tensor, the same one whenever it is asked for. All ranks must call it."""
        if self.known_whole is None:
            with torch.enable_grad():  # as the part was made, whoever asks first
                self.known_whole = _Gathered.apply(self.part, self.vocabulary, self.words_dim)  # type: ignore[no-untyped-call]
        return self.known_whole

    def values(self) -> Tensor:
        """The same for what autograd does not see."""
        if self.known_whole is not None:
            return self.known_whole.detach()
        return self.vocabulary.gather(self.part, self.words_dim)

    def again(self, part: Tensor, dim: int, *, view: bool) -> VocabParallelLogits:
        """The same words' scores over another part; as a view, what is changed in either is changed in both."""
        if not view:
            return _divided(part, self.vocabulary, dim, [0, 0])
        self.family[0] += 1
        return _divided(part, self.vocabulary, dim, self.family)

    def forgotten(self) -> VocabParallelLogits:
        """What ``detach_`` does: autograd forgets it and no value changes. A pipeline does so after a microbatch."""
        self.part = self.part.detach()
        if self.known_whole is not None:
            self.known_whole = self.known_whole.detach()
        with DisableTorchFunctionSubclass():
            self.detach_()
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _ABOUT_THE_SHAPE:
            with DisableTorchFunctionSubclass():
                return func(*args, **given)
        on_parts = _ON_PARTS.get(func)
        if on_parts is not None and args and isinstance(args[0], VocabParallelLogits) and args[0].divided:
            result = on_parts(func, *args, **given)
            if result is not NotImplemented:
                args[0].family[1] += func not in _LEAVES_NO_TRACE and result is not args[0]
                return result
        if func is Tensor.detach_:
            return args[0].forgotten()
        _refuse_late_changes(getattr(func, "__name__", ""), args)
        return func(*gather_logits(args), **gather_logits(given))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out the function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """For what comes below autograd, such as a torch.autograd.Function of the user's, which records this tensor."""
        if func is torch.ops.aten.detach.default:
            scores = args[0]
            if not scores.divided:
                return scores.values()
            return VocabParallelLogits.over(scores.part.detach(), scores.vocabulary, scores.words_dim, [0, 0])
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments):
            raise UsageError(_NO_CHANGE)
        args, given = tree_map(
            lambda leaf: leaf.values() if isinstance(leaf, VocabParallelLogits) else leaf, (args, dict(kwargs or {}))
        )
        return func(*args, **given)


class _Divided(torch.autograd.Function):
    """A tensor of the whole shape, without memory; its gradient's own part is that of the part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: VocabShard, dim: int) -> Tensor:
        ctx.vocabulary, ctx.dim = vocabulary, dim
        return VocabParallelLogits.over(part, vocabulary, dim, [0, 0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.vocabulary.cut(gradient, ctx.dim), None, None


class _Gathered(torch.autograd.Function):
    """The parts of all ranks. They all compute the same from it, so each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: VocabShard, dim: int) -> Tensor:
        ctx.vocabulary, ctx.dim = vocabulary, dim
        return vocabulary.gather(part, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.vocabulary.cut(gradient, ctx.dim), None, None


def _divided(part: Tensor, vocabulary: VocabShard, dim: int, family: list[int]) -> VocabParallelLogits:
    made: VocabParallelLogits = _Divided.apply(part, vocabulary, dim)  # type: ignore[no-untyped-call]
    made.part, made.family = part, family  # the part that autograd knows, which it hides from a function's forward
    return made


def has_sharded_logits(values: Any) -> bool:
    """Whether there are scores among these."""
    return any(isinstance(leaf, VocabParallelLogits) for leaf in tree_leaves(values))


def gather_logits(values: Any) -> Any:
    """The same structure with all scores whole. All ranks must call it."""
    return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, VocabParallelLogits) else leaf, values)


_NO_CHANGE = (
    "scores of words that are divided among workers were changed in place through a view of them; clone() the scores "
    "before changing them"
)
_NO_HOOK = (
    "{} was called on scores of words that are divided among workers after they had been used, and would see nothing; "
    "call it first"
)


def _refuse_late_changes(name: str, args: tuple[Any, ...]) -> None:
    """What comes too late for what has been computed on parts."""
    views, uses = args[0].family if args and isinstance(args[0], VocabParallelLogits) else (0, 0)
    if views and (name in _CHANGES or (name.endswith("_") and not name.endswith("__"))):
        raise UsageError(_NO_CHANGE)
    if uses and name in _HOOKS:
        raise UsageError(_NO_HOOK.format(name))


# What is computed on parts. Each gets torch's function and what it was called with, and may give NotImplemented back.


def _cast(func: Any, scores: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    part = func(scores.part, *args, **kwargs)
    return scores if part is scores.part else scores.again(part, scores.words_dim, view=False)


def _permuted(func: Any, scores: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    numbered = torch.empty(tuple(range(1, scores.ndim + 1)), device="meta")  # its lengths tell its dims apart
    dim = list(func(numbered, *args, **kwargs).shape).index(scores.words_dim + 1)
    return scores.again(func(scores.part, *args, **kwargs), dim, view=True)


def _reshaped(func: Any, scores: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Rows of scores stay rows of scores where the last dim is that of the words before and after."""
    if scores.words_dim != scores.ndim - 1 or any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    shape = func(torch.empty(scores.shape, device="meta"), *args, **kwargs).shape
    words = scores.vocabulary.words
    if not shape or shape[-1] != words or words == 1:
        return NotImplemented
    part = scores.part.reshape(*shape[:-1], scores.vocabulary.own)
    return scores.again(part, part.ndim - 1, view=True)


def _indexed(func: Any, scores: VocabParallelLogits, index: Any) -> Any:
    """Some of the rows: whatever the index says of the dims before the words'."""
    parts = index if isinstance(index, tuple) else (index,)
    if scores.words_dim != scores.ndim - 1 or not all(_is_index(each) for each in parts):
        return NotImplemented
    used = sum(_dims_of(each) for each in parts)
    all_words = isinstance(parts[-1], slice) and parts[-1] == slice(None) if parts else False
    open_end = parts and parts[-1] is Ellipsis
    behind = any(each is Ellipsis for each in parts) and not open_end
    if (used >= scores.ndim or behind) and not all_words:
        return NotImplemented
    part = func(scores.part, index)
    return scores.again(part, part.ndim - 1, view=True)


def _is_index(each: Any) -> bool:
    if isinstance(each, Tensor):
        return type(each) is Tensor and not each.is_floating_point()
    return each is None or each is Ellipsis or (isinstance(each, (int, slice)) and not isinstance(each, bool))


def _dims_of(each: Any) -> int:
    if each is None or each is Ellipsis:
        return 0
    return each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1


def _argmax(func: Any, scores: VocabParallelLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % scores.ndim != scores.words_dim:
        return NotImplemented
    return argmax(scores.part, scores.vocabulary, scores.words_dim, keepdim=keepdim)


def _cross_entropy(
    func: Any,
    scores: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes = 1 if scores.ndim > 1 else 0
    shape = [*scores.shape[:classes], *scores.shape[classes + 1 :]]
    plain = type(target) is Tensor and target.dtype == torch.long and list(target.shape) == shape
    usual = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if scores.words_dim != classes or not plain or not usual or (weight is not None and label_smoothing > 0):
        return NotImplemented
    return cross_entropy(
        scores.part, target, scores.vocabulary, classes,
        weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip


def _hooked(func: Any, scores: VocabParallelLogits, hook: Any) -> Any:
    """Full sharding's own hook only hears that a backward pass has come to the scores: it hears that of the part too.

    Gathered for it, the scores of 4 lines of 128 tokens and their loss took 128 MB in place of 48 (16,384 words).
    """
    return func(scores.part, hook) if is_fsdp_hook(hook) else NotImplemented


_ABOUT_THE_SHAPE = frozenset(
    [
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__),  # type: ignore[attr-defined]
        *(Tensor.layout.__get__, Tensor.requires_grad.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__),  # type: ignore[attr-defined]
        GET_BASE,
        *(Tensor.size, Tensor.dim, Tensor.numel, torch.numel, Tensor.__len__),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    ]
)
_LEAVES_NO_TRACE = frozenset([Tensor.argmax, torch.argmax, Tensor.detach, torch.detach, Tensor.register_hook])
"""What autograd does not see."""
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
