"""What backward passes of a step's first run begin at, where replicas add up to something else than one device has.

    loss of a shard = term + term * number + ...     each term: a mean over the shard's rows?  the same in all replicas?
    torch.autograd.grad(loss, weights)               gradients of one shard: are they summed before they are used?

Replicas add their gradients up. So a loss is a sum over the rows divided by the global batch; a mean over a shard, or a
penalty that each replica adds, counts once for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.mirroring.averages import tensor_digest

_SUMS = ("AddBackward", "SubBackward", "RsubBackward")
_SCALES = ("MulBackward", "DivBackward")
_SAME = ("NegBackward", "ToCopyBackward", "CloneBackward", "ViewBackward", "SqueezeBackward", "AliasBackward")
_MEANS = ("MeanBackward", "SumBackward")
_LISTS = ("StackBackward", "CatBackward")
_LEAF = "torch::autograd::AccumulateGrad"
_MEAN_REDUCTION = 1
_NODES = 5000
"""A term whose graph has more nodes is no penalty, and not looked into."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss.

    Args:
        mean_over: of how many items it is a mean; None where it is none.
        factors: the numbers by which it is multiplied.
        digest: of all that its gradient depends on; None where that is not known.
    """

    mean_over: int | None
    factors: tuple[float, ...]
    digest: int | None


@dataclass(slots=True)
class Passes:
    """The backward passes of one replica, in a step's first run.

    Attributes:
        losses: the terms of each loss.
        gradients: what ``torch.autograd.grad`` gave for weights, by the line that asked.
    """

    losses: list[list[Term]] = field(default_factory=list)
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _seen: list[Any] = field(default_factory=list)

    def begins_at(self, tensors: Any, *, saved: bool) -> None:
        """A backward pass is about to begin.

        Args:
            tensors: what ``torch.autograd.backward`` was given.
            saved: whether what the graph has saved may be looked at: hooks would compute it once more.
        """
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            root = tensor.grad_fn if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 else None
            if root is not None and not any(root is each for each in self._seen):
                self._seen.append(root)
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self.losses.append([_term(node, factors, saved=saved) for node, factors in _terms(root)])

    def differentiated(self, outputs: Any, gradients: Any, line: str) -> None:
        """``torch.autograd.grad`` gives gradients of weights. Those of a loss of one row are no part of a sum."""
        roots = [each.grad_fn for each in _listed(outputs) if isinstance(each, torch.Tensor) and each.grad_fn]
        if gradients and not any(_mean_over(node, (), saved=True) == 1 for root in roots for node, _ in _terms(root)):
            self.gradients[line] = [each for each in _listed(gradients) if isinstance(each, torch.Tensor)]

    def summed(self, value: torch.Tensor) -> None:
        """The step sums a tensor over the replicas."""
        for line, gradients in list(self.gradients.items()):
            if any(value is each or value.shape == each.shape for each in gradients):
                del self.gradients[line]


def means_over_shards(passes: Sequence[Passes], rows: Sequence[int | None], replicas: int) -> bool:
    """Whether a loss of all replicas is a mean over each one's rows, which nothing turns into a part of one mean.

    Args:
        passes: of each local replica.
        rows: of each one's batch.
        replicas: how many there are, of all workers.
    """
    known = [(each.losses, count) for each, count in zip(passes, rows, strict=True) if count]
    total = sum(count for _, count in known)
    if len(known) < min(2, len(rows)):
        return False
    uneven = len({count for _, count in known}) > 1

    def wrong(term: Term, count: int) -> bool:
        size = term.mean_over
        if size is None or (size == 1 and count > 1) or (size % count and size != total):
            return False
        parts = [float(count), count / total, 1 / total]
        if size == total or not uneven:
            parts.append(1 / replicas)
        if replicas != len(rows) and term.factors:
            return False  # the global batch is not known here
        return not any(math.isclose(factor, part) for factor in term.factors for part in parts if part != 1)

    return any(
        all(wrong(term, count) for term, (_, count) in zip(terms, known, strict=True))
        for terms in _side_by_side([losses for losses, _ in known])
    )


def counted_by_each(passes: Sequence[Passes], rows: Sequence[int | None], replicas: int) -> bool:
    """Whether a term of a loss is the same in all replicas, and not divided among them. Arguments as above."""
    known = [each.losses for each, count in zip(passes, rows, strict=True) if count]
    if len(known) < 2:
        return False
    found = list(_side_by_side(known))
    same = [terms for terms in found if terms[0].digest is not None and len({term.digest for term in terms}) == 1]
    if len(same) == len(found):
        return False  # so are the shards
    return any(not any(math.isclose(factor, 1 / replicas) for factor in terms[0].factors) for terms in same)


def _side_by_side(losses: Sequence[Sequence[Sequence[Term]]]) -> Iterator[tuple[Term, ...]]:
    """The replicas' terms, each with its like; nothing of those that have not the same number of them."""
    for of_one_loss in zip(*losses, strict=False):
        if len({len(terms) for terms in of_one_loss}) == 1:
            yield from zip(*of_one_loss, strict=True)


def _terms(root: Any) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """What a loss is the sum of, each with the numbers that it is multiplied by."""
    waiting: list[tuple[Any, tuple[float, ...]]] = [(root, ())]
    for _ in range(_NODES):
        if not waiting:
            return
        node, factors = waiting.pop()
        name, following = node.name(), [each for each, _ in node.next_functions if each is not None]
        if name.startswith(_SUMS) or (name.startswith(_SAME) and len(following) == 1):
            waiting += [(each, factors) for each in following]
        elif name.startswith(_SCALES) and len(following) == 1:
            waiting.append((following[0], (*factors, *_factor(node))))
        else:
            yield node, factors


def _factor(node: Any) -> Iterator[float]:
    """By what a product or quotient of one node's result multiplies it."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            number = float(value)
            yield 1 / number if node.name().startswith("DivBackward") and number else number
            return


def _term(node: Any, factors: tuple[float, ...], *, saved: bool) -> Term:
    return Term(_mean_over(node, factors, saved=saved), factors, _digest(node) if saved else None)


def _mean_over(node: Any, factors: tuple[float, ...], *, saved: bool) -> int | None:
    name = node.name()
    if name.startswith(_MEANS):
        sizes = node._saved_self_sym_sizes
        child = node.next_functions[0][0]
        if not sizes or (child is not None and child.name().startswith(_LISTS)):
            return None
        size = int(sizes[0])
        by_hand = any(math.isclose(factor, 1 / size) for factor in factors) if size else False
        return size if name.startswith("MeanBackward") or by_hand else None
    if getattr(node, "_saved_reduction", None) != _MEAN_REDUCTION or not saved:
        return None
    given = node._saved_self
    return int(given.shape[0]) if isinstance(given, torch.Tensor) and given.ndim else None


def _digest(root: Any) -> int | None:
    """Of what a term's gradient depends on, where nothing but weights, and all that is saved, tells it."""
    digest, weights, binary, kept = 0, False, False, False
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if len(seen) > _NODES or hasattr(node, "saved_tensors"):  # a function of Python's may do anything
            return None
        if node.name() == _LEAF:
            weights = True
            continue
        digest = hash((digest, node.name()))
        for attribute in sorted(each for each in dir(node) if each.startswith("_saved_")):
            try:
                value = getattr(node, attribute)
            except RuntimeError:  # freed, or changed in place since
                return None
            tensors = [each for each in _listed(value) if isinstance(each, torch.Tensor)]
            if any(each.numel() == 0 for each in tensors):  # of no rows
                return None
            kept = kept or any(each.ndim for each in tensors)
            digest = hash((digest, attribute, *((tuple(each.shape), tensor_digest(each)) for each in tensors)))
            if not tensors:
                digest = hash((digest, repr(value)))
        following = [each for each, _ in node.next_functions]
        binary = binary or (None in following and not node.name().startswith(_SCALES))
        for each in following:
            if each is not None and each not in seen:
                seen.add(each)
                waiting.append(each)
    return digest if weights and (kept or not binary) else None


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
