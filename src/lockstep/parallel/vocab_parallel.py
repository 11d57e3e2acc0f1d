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
    def most(self) -> int:  # the size of the largest range
        return -(-self.size // self.ranks)

    @property
    def begin(self) -> int:  # the first token id of this rank
        return min(self.rank * self.most, self.size)

    @property
    def local_size(self) -> int:  # the size of this rank's range
        return min(self.most, self.size - self.begin)

    def cut(self, logits: Tensor, dim: int) -> Tensor:
        """This rank's part of whole logits, with the vocabulary along ``dim``."""
        return logits.narrow(dim, self.begin, self.local_size)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All-gathers the logits, without autograd. All ranks must call it."""
        # Padded to the largest range: all_gather takes tensors of one shape.
        first = part.detach().movedim(dim, 0)
        padded = first.new_zeros(self.most, *first.shape[1:])
        padded[: self.local_size] = first
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        if padded.numel():
            dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([shard.movedim(0, dim) for shard in parts], dim)
        return whole.narrow(dim, 0, self.size).contiguous()  # the padding is at the end

    def reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if values.numel():
            dist.all_reduce(values, op, group=self.group)
        return values


class _Sums(torch.autograd.Function):
    """Per token, after subtracting the largest logit: logsumexp, and the target's logit."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, targets: Tensor, vocabulary: VocabShard, dim: int) -> tuple[Tensor, Tensor]:
        with torch.autocast(part.device.type, enabled=False):
            # F.cross_entropy computes in float32 under autocast, and the shifted logits need its range here too.
            logits = part if part.dtype in (torch.float32, torch.float64) else part.float()
            # torch's amax refuses a dimension of no elements, and a rank may have no token.
            logits = logits if vocabulary.local_size else _lowest(logits, dim)
            shifted = logits - vocabulary.reduce(logits.amax(dim, keepdim=True), dist.ReduceOp.MAX)
            place = (targets - vocabulary.begin).unsqueeze(dim)
            is_local = (place >= 0) & (place < vocabulary.local_size)
            place = torch.where(is_local, place, 0)
            picked = torch.where(is_local, shifted.gather(dim, place), 0)
            # In place, and one all-reduce for both sums: the logits of a rank are often its largest tensor.
            powers = shifted.exp_()
            spread, picked = vocabulary.reduce(torch.stack([powers.sum(dim, keepdim=True), picked]))
            softmax = powers.div_(spread)
        ctx.save_for_backward(softmax, place, is_local)
        ctx.dim, ctx.dtype, ctx.local_size = dim, part.dtype, vocabulary.local_size
        return spread.log().squeeze(dim), picked.squeeze(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_spread: Tensor, to_picked: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, place, is_local = ctx.saved_tensors
        gradient = softmax * to_spread.unsqueeze(ctx.dim)
        gradient.scatter_add_(ctx.dim, place, torch.where(is_local, to_picked.unsqueeze(ctx.dim), 0))
        return gradient.narrow(ctx.dim, 0, ctx.local_size).to(ctx.dtype), None, None, None


def _lowest(logits: Tensor, dim: int) -> Tensor:
    """One logit a token, which no other is smaller than, in place of an empty range."""
    return logits.new_full([*logits.shape[:dim], 1, *logits.shape[dim + 1 :]], -torch.inf)


def _check(targets: Tensor, counts: Tensor, size: int) -> None:
    # As F.cross_entropy does on a GPU: the device checks, and the host does not wait for it.
    if targets.is_cuda:
        compat.assert_async((~counts | ((targets >= 0) & (targets < size))).all())
        return
    wrong = targets[counts & ((targets < 0) | (targets >= size))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")  # F.cross_entropy's message


_may_stay_divided: ContextVar[bool] = ContextVar("lockstep_logits_may_stay_divided", default=False)


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
    return _divided(part, vocabulary, dim) if _may_stay_divided.get() else _gathered(part, vocabulary, dim)


class VocabParallelLogits(Tensor):
    """A tensor with the shape of the whole logits that holds this rank's part. Made by ``vocab_parallel_logits``.

    Autograd records operations on parts on the part, and operations that bypass ``__torch_function__`` on this tensor.
    In both cases the part gets its gradient.
    """

    part: Tensor  # this rank's logits
    vocabulary: VocabShard
    vocab_dim: int  # the dimension of the vocabulary
    gathered: Tensor | None  # the gathered logits, once they have been gathered

    @staticmethod
    def over(part: Tensor, vocabulary: VocabShard, dim: int) -> VocabParallelLogits:
        """Makes a tensor with the whole shape and no memory of its own."""
        sizes = [*part.shape[:dim], vocabulary.size, *part.shape[dim + 1 :]]
        logits: VocabParallelLogits
        logits = compat.make_wrapper_subclass(VocabParallelLogits, sizes, dtype=part.dtype, device=part.device)
        logits.part, logits.vocabulary, logits.vocab_dim, logits.gathered = part, vocabulary, dim, None
        return logits

    @property
    def divided(self) -> bool:
        """Whether the logits have not been gathered yet."""
        return self.gathered is None

    def whole(self) -> Tensor:
        """The gathered logits as a plain tensor, the same one at each call. All ranks must call it."""
        if self.gathered is None:
            # The gathered tensor is kept for later callers, so it has a graph whatever the mode of the first one.
            with torch.enable_grad():
                self.gathered = _gathered(self.part, self.vocabulary, self.vocab_dim)
        return self.gathered

    def values(self) -> Tensor:
        if self.gathered is not None:
            return self.gathered.detach()
        return self.vocabulary.gather(self.part, self.vocab_dim)

    def detach_logits(self) -> VocabParallelLogits:
        """``detach_``, which a pipeline calls after a microbatch."""
        self.part = self.part.detach()
        if self.gathered is not None:
            self.gathered = self.gathered.detach()
        with compat.DisableTorchFunctionSubclass():
            self.detach_()
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _ABOUT_THE_SHAPE:
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if args and isinstance(args[0], VocabParallelLogits):
            if func in _ON_PARTS and args[0].divided:
                result = _ON_PARTS[func](func, *args, **keywords)
                if result is not NotImplemented:
                    return result
            if func is Tensor.detach_:
                return args[0].detach_logits()
            _refuse_changes(getattr(func, "__name__", ""))
        return func(*gather_logits(args), **gather_logits(keywords))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out the function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Operators below autograd, such as those in a user's torch.autograd.Function."""
        if func is torch.ops.aten.detach.default and args[0].divided:
            return VocabParallelLogits.over(args[0].part.detach(), args[0].vocabulary, args[0].vocab_dim)
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
            raise UsageError(_NO_CHANGE)
        args, keywords = compat.tree_map(
            lambda leaf: leaf.values() if isinstance(leaf, VocabParallelLogits) else leaf, (args, dict(kwargs or {}))
        )
        return func(*args, **keywords)


class _Whole(torch.autograd.Function):
    """A part as the whole logits, gathered or divided; backwards, this rank's range of the gradient.

    All ranks compute the same from gathered logits, so each has the whole gradient, without a reduction.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: VocabShard, dim: int, gathered: bool) -> Tensor:
        ctx.vocabulary, ctx.dim = vocabulary, dim
        return vocabulary.gather(part, dim) if gathered else VocabParallelLogits.over(part, vocabulary, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.vocabulary.cut(gradient, ctx.dim), None, None, None


def _gathered(part: Tensor, vocabulary: VocabShard, dim: int) -> Tensor:
    whole: Tensor = _Whole.apply(part, vocabulary, dim, True)  # type: ignore[no-untyped-call]
    return whole


def _divided(part: Tensor, vocabulary: VocabShard, dim: int) -> VocabParallelLogits:
    logits: VocabParallelLogits = _Whole.apply(part, vocabulary, dim, False)  # type: ignore[no-untyped-call]
    # With its autograd history, which a Function's forward does not see.
    logits.part = part
    return logits


def has_sharded_logits(values: Any) -> bool:
    """Whether any of the values are divided logits."""
    return any(isinstance(leaf, VocabParallelLogits) for leaf in compat.tree_leaves(values))


def gather_logits(values: Any) -> Any:
    """The same structure with all logits gathered. All ranks must call it."""
    return compat.tree_map(lambda leaf: leaf.whole() if isinstance(leaf, VocabParallelLogits) else leaf, values)


_NO_CHANGE = (
    "logits that are divided among workers were changed in place, or got a hook, which what is computed on parts would "
    "not see; call clone() on the logits first, which gathers them"
)
_CHANGES = frozenset(
    [
        *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")),
        *("__setitem__", "register_hook", "retain_grad"),
    ]
)


def _refuse_changes(name: str) -> None:
    if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
        raise UsageError(_NO_CHANGE)


# Functions that run on parts. Each takes torch's function and its arguments, and may return NotImplemented.


def _cast(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    part = func(logits.part, *args, **kwargs)
    return logits if part is logits.part else _divided(part, logits.vocabulary, logits.vocab_dim)


def _permuted(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    # The sizes 1, 2, 3, ... identify the dimensions, so torch itself says where the vocabulary goes.
    numbered = torch.empty(tuple(range(1, logits.ndim + 1)), device="meta")
    dim = list(func(numbered, *args, **kwargs).shape).index(logits.vocab_dim + 1)
    return _divided(func(logits.part, *args, **kwargs), logits.vocabulary, dim)


def _reshaped(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Reshapes that keep the vocabulary as the last dimension."""
    if logits.vocab_dim != logits.ndim - 1 or any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    size = logits.vocabulary.size
    # With one token in the vocabulary another dimension of size 1 could be the last one.
    if not shape or shape[-1] != size or size == 1:
        return NotImplemented
    part = logits.part.reshape(*shape[:-1], logits.vocabulary.local_size)
    return _divided(part, logits.vocabulary, part.ndim - 1)


def _indexed(func: Any, logits: VocabParallelLogits, index: Any) -> Any:
    """An index into the dimensions before the vocabulary's."""
    parts = index if isinstance(index, tuple) else (index,)
    if logits.vocab_dim != logits.ndim - 1 or not all(_is_index(item) for item in parts):
        return NotImplemented
    dims = sum(_dims_of(item) for item in parts)
    whole_vocabulary = isinstance(parts[-1], slice) and parts[-1] == slice(None) if parts else False
    open_end = parts and parts[-1] is Ellipsis
    behind = any(item is Ellipsis for item in parts) and not open_end
    if (dims >= logits.ndim or behind) and not whole_vocabulary:
        return NotImplemented
    part = func(logits.part, index)
    return _divided(part, logits.vocabulary, part.ndim - 1)


def _is_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return type(item) is Tensor and not item.is_floating_point()
    return item is None or item is Ellipsis or (isinstance(item, (int, slice)) and not isinstance(item, bool))


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _argmax(func: Any, logits: VocabParallelLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    """The token id with the largest logit, the first of equal ones."""
    if dim is None or dim % logits.ndim != logits.vocab_dim:
        return NotImplemented
    dim, vocabulary, part = logits.vocab_dim, logits.vocabulary, logits.part.detach()
    # A rank with an empty range contributes -inf, which never wins: earlier ranks win ties.
    best, token = (part if vocabulary.local_size else _lowest(part, dim)).max(dim)
    # One message for both; float64 is exact for every logit and token id.
    candidates = torch.stack([best.double(), (token + vocabulary.begin).double()])
    gathered = [torch.empty_like(candidates) for _ in range(vocabulary.ranks)]
    if candidates.numel():
        dist.all_gather(gathered, candidates, group=vocabulary.group)
    largest, tokens = torch.stack(gathered).unbind(1)
    winner: Tensor = tokens.gather(0, largest.argmax(0, keepdim=True))[0].long()
    return winner.unsqueeze(dim) if keepdim else winner


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
    """With the same bits on all ranks. All must call it, with the same targets."""
    dim, vocabulary, part = logits.vocab_dim, logits.vocabulary, logits.part
    shape = [*logits.shape[:dim], *logits.shape[dim + 1 :]]
    # Class probabilities, label smoothing and other forms gather the logits: NotImplemented says so to the caller.
    plain = type(target) is Tensor and target.dtype == torch.long and list(target.shape) == shape
    usual = size_average is None and reduce is None and reduction in ("none", "sum", "mean") and not label_smoothing
    if dim != (1 if logits.ndim > 1 else 0) or not plain or not usual:
        return NotImplemented
    counts = target != ignore_index
    _check(target, counts, vocabulary.size)
    labels = torch.where(counts, target, 0)
    spread, picked = _Sums.apply(part, labels, vocabulary, dim)  # type: ignore[no-untyped-call]
    weights = counts.to(spread.dtype) if weight is None else torch.where(counts, weight[labels], 0).to(spread.dtype)
    values = torch.where(counts, (spread - picked) * weights, 0)
    # F.cross_entropy returns the dtype of the logits, and float32 under autocast.
    if part.dtype != values.dtype and not torch.is_autocast_enabled(part.device.type):
        values = values.to(part.dtype)
    if reduction == "none":
        return values
    return values.sum() / weights.sum() if reduction == "mean" else values.sum()


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
_ON_PARTS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _indexed,
    Tensor.register_hook: _hooked,
    **dict.fromkeys([Tensor.argmax, torch.argmax], _argmax),
    **dict.fromkeys([Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to], _cast),
    **dict.fromkeys([Tensor.detach, torch.detach, Tensor.contiguous], _cast),
    **dict.fromkeys([Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim], _permuted),
    **dict.fromkeys([Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten], _reshaped),
    **dict.fromkeys([Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze], _reshaped),
}
