"""Looks at the losses of a step's first run for sums over replicas that differ from one device's gradients.

    loss of a shard = term + term * number + ...     is a term a mean over the shard's rows, or equal in all replicas?
    torch.autograd.grad(loss, weights)               is the gradient of one shard summed before it is used?

Gradients of replicas are added up, so a loss is a sum over rows divided by the size of the global batch. A mean over
the shard, or a penalty that each replica adds, would count once for each replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.mirroring.module.buffers import tensor_digest
from lockstep.replicas.watcher import listed
from lockstep.watch.rows import MIXING_ADVICE, Mixing

# Names of nodes in the autograd graph, as torch 2.13 has them; ``_torch_compat`` refuses a torch that renames one.
_SUMS = ("AddBackward", "SubBackward", "RsubBackward")
_SCALES = ("MulBackward", "DivBackward")
_SAME = ("NegBackward", "ToCopyBackward", "CloneBackward", "ViewBackward", "SqueezeBackward", "AliasBackward")
_MEANS = ("MeanBackward", "SumBackward")
_LISTS = ("StackBackward", "CatBackward")
_LEAF = "AccumulateGrad"
_OF_PYTHON = torch.autograd.function.BackwardCFunction
_MEAN_REDUCTION = 1
_SAMPLED = 1024  # values, at least, that the digest of a larger tensor is made of
_LONGEST_CYCLE = 1025  # runs, that gradients may be accumulated over
_NODES = 5000  # a term whose graph has more nodes is no penalty, and not looked into


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss."""

    mean_over: int | None  # the number of items that it is a mean of
    is_sum: bool  # of several items
    factors: tuple[float, ...]  # by which it is multiplied
    digest: int | None  # of all that its gradient depends on, if that is known
    labels: float | None = None  # of a mean over labels: their number, or the sum of their weights, if not that of all


@dataclass(slots=True)
class Passes:
    """The backward passes of one replica, in a step's first run."""

    losses: list[list[Term]] = field(default_factory=list)  # the terms of each
    gradients: dict[str, list[torch.Size]] = field(default_factory=dict)
    """Shapes of those from torch.autograd.grad, by the line of the call."""
    calls_collectives: bool = False
    """Whether the step has called a collective: then the number that it divides a sum by may be a count of the whole
    batch, of labels or events, that happens to be the number of the shard's rows."""
    _roots: list[Any] = field(default_factory=list)

    def begins_at(self, tensors: Sequence[Any], *, saved: bool) -> None:
        """Notes the losses of a backward pass that is about to begin.

        ``saved`` says whether saved tensors may be read: hooks may compute them anew.
        """
        for tensor in tensors:
            root = tensor.grad_fn if isinstance(tensor, Tensor) and tensor.numel() == 1 else None
            # A loss that is differentiated twice, with retain_graph=True, is one loss.
            if root is not None and not any(root is earlier for earlier in self._roots):
                self._roots.append(root)
                self._add(_terms(root), saved=saved)

    def begins_again_at(self, tensors: Sequence[Any]) -> None:
        """Notes the losses of a backward pass in a later run. The graph of a loss of one term is not walked through."""
        for tensor in tensors:
            root = tensor.grad_fn if isinstance(tensor, Tensor) and tensor.numel() == 1 else None
            if root is not None:
                nodes = list(_terms(root))
                self._add(nodes, digests=len(nodes) > 1 or bool(self.losses))

    def _add(self, nodes: Iterable[tuple[Any, tuple[float, ...]]], *, saved: bool = True, digests: bool = True) -> None:
        by_hand = not self.calls_collectives
        terms = [_term(node, factors, saved=saved, digests=digests, by_hand=by_hand) for node, factors in nodes]
        self.losses.append(terms)

    def differentiates(self, outputs: Sequence[Any], weights: Sequence[Tensor], line: str) -> None:
        """Notes that ``torch.autograd.grad`` at ``line`` gives gradients of weights, except of a loss of one row."""
        roots = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn]
        if not any(_mean_over(node, (), saved=True) == 1 for root in roots for node, _ in _terms(root)):
            self.gradients[line] = [weight.shape for weight in weights]

    def forget_graphs(self) -> None:
        """Releases the graphs of the losses."""
        self._roots.clear()

    def summed(self, value: Tensor) -> None:
        """Notes that the step sums a tensor over the replicas. Gradients that it sums need no warning."""
        self.calls_collectives = True
        for line, shapes in list(self.gradients.items()):
            if value.shape in shapes:
                del self.gradients[line]


def is_mean_of(outputs: Sequence[Any], *, rows: int) -> bool:
    """Whether what is differentiated is a mean over so many rows, which nothing multiplies by their number."""
    roots = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.numel() == 1]
    return any(
        _mean_over(node, factors, saved=True) == rows and not any(math.isclose(factor, rows) for factor in factors)
        for root in roots
        if root is not None
        for node, factors in _terms(root)
    )


def loss_warnings(
    passes: Sequence[Passes], rows: Sequence[int | None], replicas: int, *, mixing: Mixing | None, cycle: int
) -> Iterator[str]:
    """Yields the warnings about a step's losses.

    Args:
        passes: of each local replica.
        rows: of each local replica's shard.
        replicas: those of all workers.
        mixing: what was found of rows.
        cycle: the number of runs whose gradients are accumulated for an update; 0 while it is not known.
    """
    active = [(replica_passes, count) for replica_passes, count in zip(passes, rows, strict=True) if count]
    side_by_side = list(_side_by_side([replica_passes.losses for replica_passes, _ in active]))
    counts = [count for _, count in active]
    enough = len(active) >= min(2, len(rows))
    # A step may divide each of its losses by their number.
    divisors = {1, cycle, cycle * len(side_by_side)} if cycle else range(1, _LONGEST_CYCLE)
    is_mean = enough and any(
        _is_mean_over_shards(terms, counts, len(rows), replicas, divisors) for terms in side_by_side
    )
    if is_mean:
        yield (
            f"back-propagates a mean over each replica's rows, and the gradients of {replicas} replicas are added up; "
            'compute one loss a row (reduction="none") and give them to ls.compute_average_loss(losses, '
            "global_batch_size=rows), which divides by the global batch"
        )
    if len(active) >= 2 and _counts_for_each(side_by_side, replicas):
        yield (
            "back-propagates a term that is the same in all replicas, as a penalty on weights is, and it counts "
            f"{replicas} times; divide it among them with ls.scale_regularization_loss(term)"
        )
    if mixing is not None and not (is_mean and mixing.is_mean):
        yield f"compares or combines the rows of its shard ({mixing}), {MIXING_ADVICE}"
    lines = dict.fromkeys(line for replica_passes in passes for line in replica_passes.gradients)
    if lines:
        yield (
            f"asks torch.autograd.grad for gradients of weights at {', '.join(lines)}, which are those of one "
            "replica's rows; before norms or penalties of them, sum them with ls.get_replica_context().all_reduce("
            '"sum", gradient), or call backward() and read .grad, which is the sum over all replicas'
        )


def _is_mean_over_shards(
    terms: Sequence[Term], counts: Sequence[float], local: int, replicas: int, divisors: Iterable[int]
) -> bool:
    """Whether a term of all replicas is a mean over each one's rows that nothing turns into a part of one mean.

    Such a part may be divided by one of ``divisors`` beside.
    """
    if any(term.labels is not None for term in terms):  # shares are those of labels, not of rows
        counts = [count if term.labels is None else term.labels for term, count in zip(terms, counts, strict=True)]
    total, uneven = sum(counts), len(set(counts)) > 1

    def wrong(term: Term, count: float) -> bool:
        size = term.mean_over
        if size is None or (term.is_sum and size != count):
            return False
        parts = [float(count), count / total, 1 / total]
        if size == total or not uneven:
            parts += [1 / (replicas * divisor) for divisor in divisors]
        if replicas != local and term.factors:
            return False  # the global batch is not known here
        return not any(math.isclose(factor, part) for factor in term.factors for part in parts if part != 1)

    def divided(part: float) -> bool:
        pairs = zip(terms, counts, strict=True)
        return all(any(math.isclose(factor, part * count) for factor in term.factors) for term, count in pairs)

    # Sums that are divided by what differs between replicas, as the number of items that a mask leaves.
    if terms[0].is_sum and len({term.factors for term in terms}) > 1 and not (divided(1.0) or divided(1 / total)):
        return True
    of_one_row = all(term.mean_over == 1 for term in terms) and max(counts) > 1
    return not of_one_row and all(map(wrong, terms, counts))


def _counts_for_each(side_by_side: Sequence[Sequence[Term]], replicas: int) -> bool:
    """Whether a term of a loss is equal in all replicas, and is not divided by their number."""
    same = [terms for terms in side_by_side if terms[0].digest is not None and len({t.digest for t in terms}) == 1]
    if len(same) == len(side_by_side):
        return False  # so are the shards
    return any(not any(math.isclose(factor, 1 / replicas) for factor in terms[0].factors) for terms in same)


def _side_by_side(losses: Sequence[Sequence[Sequence[Term]]]) -> Iterator[tuple[Term, ...]]:
    """Each term of a loss with those of the other replicas; nothing of losses with different numbers of terms."""
    for of_one_loss in zip(*losses, strict=False):
        if len({len(terms) for terms in of_one_loss}) == 1:
            yield from zip(*of_one_loss, strict=True)


def _terms(root: Any) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """The nodes that a loss is the sum of, each with the numbers that it is multiplied by."""
    waiting: list[tuple[Any, tuple[float, ...]]] = [(root, ())]
    for _ in range(_NODES):
        if not waiting:
            return
        node, factors = waiting.pop()
        name, following = _name(node), [child for child, _ in node.next_functions if child is not None]
        if name.startswith(_SUMS) or (name.startswith(_SAME) and len(following) == 1):
            waiting += [(child, factors) for child in following]
        elif name.startswith(_SCALES) and len(following) == 1:
            waiting.append((following[0], (*factors, *_factor(node))))
        else:
            yield node, factors


def _factor(node: Any) -> Iterator[float]:
    """Yields the number by which a product or quotient multiplies the result of its one node, if it is saved."""
    for name in ("_saved_other", "_saved_self"):
        value = _saved(node, name)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            number = float(value.detach())
            yield 1 / number if _name(node).startswith("DivBackward") and number else number
            return


def _term(node: Any, factors: tuple[float, ...], *, saved: bool, digests: bool, by_hand: bool) -> Term:
    is_sum = _name(node).startswith("SumBackward") and bool(_saved(node, "_saved_self_sym_sizes"))
    mean_over, digest = _mean_over(node, factors, saved=saved), _digest(node) if saved and digests else None
    if is_sum and not by_hand:
        mean_over = None
    return Term(mean_over, is_sum, factors, digest, _labels(node) if saved and mean_over is not None else None)


def _labels(node: Any) -> float | None:
    """What a mean over labels is divided by, where some are ignored or have weights."""
    divisor, labels = _saved(node, "_saved_total_weight"), _saved(node, "_saved_target")
    if divisor is None or labels is None or math.isclose(float(divisor), labels.numel(), rel_tol=1e-6):
        return None
    return float(divisor)


def _mean_over(node: Any, factors: tuple[float, ...], *, saved: bool) -> int | None:
    name = _name(node)
    if name.startswith(_MEANS):
        sizes = _saved(node, "_saved_self_sym_sizes")
        child = node.next_functions[0][0]
        # A mean of a stack or a list of losses is one over losses and not over rows.
        if not sizes or (child is not None and _name(child).startswith(_LISTS)):
            return None
        size = int(sizes[0])
        by_hand = any(math.isclose(factor, 1 / size) for factor in factors) if size else False
        return size if name.startswith("MeanBackward") or by_hand else None
    if not saved or _saved(node, "_saved_reduction") != _MEAN_REDUCTION:
        return None
    inputs = _saved(node, "_saved_self")
    return int(inputs.shape[0]) if isinstance(inputs, Tensor) and inputs.ndim else None


def _digest(root: Any) -> int | None:
    """A digest of a term's graph and saved tensors; None if its gradient may depend on anything else."""
    digest, weights, binary, has_tensors = 0, False, False, False
    visited, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        # A Function of Python may compute with anything that it does not save.
        if len(visited) > _NODES or isinstance(node, _OF_PYTHON):
            return None
        if _name(node) == _LEAF:
            weights = True
            continue
        digest = hash((digest, _name(node)))
        for attribute in sorted(name for name in dir(node) if name.startswith("_saved_")):
            try:
                value = getattr(node, attribute)
            except RuntimeError:  # freed, or changed in place since
                return None
            tensors = [item for item in listed(value) if isinstance(item, Tensor)]
            # A tensor of no rows, or whose memory is freed, has no values to compare.
            if any(tensor.numel() == 0 or not tensor.untyped_storage().size() for tensor in tensors):
                return None
            has_tensors = has_tensors or any(tensor.ndim for tensor in tensors)
            digest = hash((digest, attribute, *((tuple(tensor.shape), _sample(tensor)) for tensor in tensors)))
            if not tensors:
                digest = hash((digest, repr(value)))
        following = [child for child, _ in node.next_functions]
        binary = binary or (None in following and not _name(node).startswith(_SCALES))
        for child in following:
            if child is not None and child not in visited:
                visited.add(child)
                waiting.append(child)
    return digest if weights and (has_tensors or not binary) else None


def _sample(tensor: Tensor) -> int:
    """A digest of some of a tensor's values, which differ between shards.

    Digests of all values of all saved tensors took a quarter of the CPU time of MobileNetV2's first step.
    """
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        # As it lies in memory, so that flattening copies nothing.
        tensor = tensor.permute(0, 2, 3, 1)
    # Odd, so that it does not meet the same columns in every row.
    step = tensor.numel() // _SAMPLED | 1
    return tensor_digest(tensor.flatten()[::step])


def _name(node: Any) -> str:
    """Such as "MeanBackward0"; a function of Python's may be called anything."""
    return "" if isinstance(node, _OF_PYTHON) else type(node).__name__


def _saved(node: Any, name: str) -> Any:
    """What a function has saved; None where it is freed, or has been changed in place since."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None
