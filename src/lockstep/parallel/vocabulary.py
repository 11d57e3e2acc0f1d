"""Scores of words that are divided among tensor ranks: what is computed of them without gathering them.

    own scores -> largest                 -> largest of all ranks        one number a token is sent
               -> sum of exp, target's    -> sums of all ranks           two numbers a token

(Shoeybi et al. 2019, "Megatron-LM", section 3). The largest score is one more than that, so that nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
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
    vocabulary: Vocabulary,
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


def argmax(part: Tensor, vocabulary: Vocabulary, dim: int, *, keepdim: bool = False) -> Tensor:
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
        ctx: Any, part: Tensor, targets: Tensor, vocabulary: Vocabulary, dim: int, with_total: bool
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


def _largest(scores: Tensor, vocabulary: Vocabulary, dim: int) -> Tensor:
    largest = (scores if vocabulary.own else _lowest(scores, dim)).amax(dim, keepdim=True)
    return vocabulary.reduce(largest, dist.ReduceOp.MAX)


def _lowest(scores: Tensor, dim: int) -> Tensor:
    return scores.new_full([*scores.shape[:dim], 1, *scores.shape[dim + 1 :]], -torch.inf)


def _check(targets: Tensor, counts: Tensor, words: int) -> None:
    if targets.is_cuda:  # as F.cross_entropy there: the host does not wait for the answer
        torch._assert_async((~counts | ((targets >= 0) & (targets < words))).all())
        return
    wrong = targets[counts & ((targets < 0) | (targets >= words))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")  # what F.cross_entropy says
