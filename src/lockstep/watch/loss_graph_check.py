"""Looks at the losses of a step's first run for sums over replicas that differ from one device's gradients.

    loss of a shard = term + term * number + ...     is a term a mean over the shard's rows, or equal in all replicas?
    torch.autograd.grad(loss, weights)               is the gradient of one shard summed before it is used?

Gradients of replicas are added up, so a loss is a sum over rows divided by the size of the global batch. A mean over
the shard, or a penalty that each replica adds, would count once for each replica. If the first run makes no update,
they are judged in the run that does: a loss may be divided by the number of accumulated runs. The first uneven batch
is looked at once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction, disable_dispatch_modes, saved_tensors_hooks, tree_leaves
from lockstep.collectives.communicator import call_site
from lockstep.mirroring.module.buffers import tensor_digest
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.watcher import PROCEED, Differentiation, Run, TorchCalled, Watcher, as_sequence
from lockstep.watch.row_dependence import MIXING_ADVICE, Mixing
from lockstep.watch.step_names import description_of_step, is_of_the_package, warn_caller


def _kinds(*results: Tensor) -> frozenset[type]:
    return frozenset(type(result.grad_fn) for result in results)


# A node of an autograd graph is told by the type of what torch makes here, and not by the name that a torch gives it.
with torch.inference_mode(False), torch.enable_grad():  # the import may be in a block without gradients
    _x = torch.ones(1, requires_grad=True)
    _SUMS = _kinds(_x + _x, _x + 1, _x - _x, _x - 1, 1 - _x, torch.rsub(_x, _x))
    _DIVISIONS = _kinds(_x / _x, _x / 2)
    _SCALES = _DIVISIONS | _kinds(_x * _x, _x * 2)
    _SAME = _kinds(-_x, _x.double(), _x.clone(), _x.view(1, 1), torch.ops.aten.alias(_x)) | _kinds(
        _x.squeeze(), _x.squeeze(0), _x.squeeze((0,))
    )
    _MEANS, _ITEM_SUMS = _kinds(_x.mean(), _x.mean(0)), _kinds(_x.sum(), _x.sum(0))
    _LISTS = _kinds(torch.stack([_x, _x]), torch.cat([_x, _x]))
    _PARTS = _kinds(_x.unsqueeze(0), _x[0])
    _LEAF = type((_x + 1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
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
    is_quotient: bool = False  # whether a loss is divided by a sum over rows
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
                self.is_quotient = self.is_quotient or _divides_by_a_sum(root)
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
    quotient = enough and all(replica_passes.is_quotient for replica_passes, _ in active)
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
    combined = mixing is not None and not (is_mean and mixing.is_mean)
    if combined or (quotient and not is_mean):
        yield f"compares or combines the rows of its shard ({mixing or 'a quotient of sums'}), {MIXING_ADVICE}"
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
        kind, following = type(node), [child for child, _ in node.next_functions if child is not None]
        if kind in _SUMS or (kind in _SAME and len(following) == 1):
            waiting += [(child, factors) for child in following]
        elif kind in _SCALES and len(following) == 1:
            waiting.append((following[0], (*factors, *_factor(node))))
        else:
            yield node, factors


def _factor(node: Any) -> Iterator[float]:
    """Yields the number by which a product or quotient multiplies the result of its one node, if it is saved."""
    for name in ("_saved_other", "_saved_self"):
        value = _saved(node, name)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            number = float(value.detach())
            yield 1 / number if type(node) in _DIVISIONS and number else number
            return


def _term(node: Any, factors: tuple[float, ...], *, saved: bool, digests: bool, by_hand: bool) -> Term:
    is_sum = type(node) in _ITEM_SUMS and bool(_saved(node, "_saved_self_sym_sizes"))
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
    if type(node) in _MEANS | _ITEM_SUMS:
        sizes = _saved(node, "_saved_self_sym_sizes")
        child = node.next_functions[0][0]
        # A mean of a stack or a list of losses is one over losses and not over rows.
        if not sizes or type(child) in _LISTS:
            return None
        size = int(sizes[0])
        by_hand = any(math.isclose(factor, 1 / size) for factor in factors) if size else False
        return size if type(node) in _MEANS or by_hand else None
    if not saved or _saved(node, "_saved_reduction") != _MEAN_REDUCTION:
        return None
    inputs = _saved(node, "_saved_self")
    return int(inputs.shape[0]) if isinstance(inputs, Tensor) and inputs.ndim else None


def _divides_by_a_sum(root: Any) -> bool:
    """Whether a loss is divided by a sum over rows that depends on weights, as a Dice loss is.

    The copies of ``row_dependence`` do not tell of it where the sum is the same for any rows, as that of softmax is.
    """
    visited, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        following = [child for child, _ in node.next_functions]
        if type(node) in _DIVISIONS and len(following) == 2 and _sums_over_rows(following[1]):
            return True
        waiting += [child for child in following if child is not None and child not in visited]
        visited.update(waiting)
    return False


def _sums_over_rows(node: Any) -> bool:
    """Whether a number is a sum over the first dimension of what is no weight, also with a number added."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if type(node) in _SUMS | _SCALES | _SAME | _PARTS:
            waiting += [child for child, _ in node.next_functions]
        elif type(node) in _ITEM_SUMS:
            sizes = _saved(node, "_saved_self_sym_sizes")
            if sizes and _goes_over_the_first(node, len(sizes)) and not _is_weight(node.next_functions[0][0]):
                return True
    return False


def _is_weight(node: Any) -> bool:
    """Whether a function gives a weight, or a view of one."""
    while node is not None and type(node) is not _LEAF:
        following = [child for child, _ in node.next_functions]
        if len(following) != 1:
            return False
        node = following[0]
    return node is not None


def _goes_over_the_first(node: Any, dims: int) -> bool:
    reduced_dims = _saved(node, "_saved_dim")
    if reduced_dims is None or reduced_dims == ():
        return True
    # torch 2.13 saves dims as unsigned numbers: -1 is 2**64 - 1.
    return any((dim - 2**64 if dim >= 2**63 else dim) % dims == 0 for dim in as_sequence(reduced_dims))


def _digest(root: Any) -> int | None:
    """A digest of a term's graph and saved tensors; None if its gradient may depend on anything else."""
    digest, weights, binary, has_tensors = 0, False, False, False
    visited, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        # A Function of Python may compute with anything that it does not save.
        if len(visited) > _NODES or isinstance(node, _OF_PYTHON):
            return None
        if type(node) is _LEAF:
            weights = True
            continue
        digest = hash((digest, type(node)))
        for attribute in sorted(name for name in dir(node) if name.startswith("_saved_")):
            try:
                value = getattr(node, attribute)
            except RuntimeError:  # freed, or changed in place since
                return None
            tensors = [item for item in as_sequence(value) if isinstance(item, Tensor)]
            # A tensor of no rows, or whose memory is freed, has no values to compare.
            if any(tensor.numel() == 0 or not tensor.untyped_storage().size() for tensor in tensors):
                return None
            has_tensors = has_tensors or any(tensor.ndim for tensor in tensors)
            digest = hash((digest, attribute, *((tuple(tensor.shape), _sample(tensor)) for tensor in tensors)))
            if not tensors:
                digest = hash((digest, repr(value)))
        following = [child for child, _ in node.next_functions]
        binary = binary or (None in following and type(node) not in _SCALES)
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


def _saved(node: Any, name: str) -> Any:
    """What a function has saved; None where it is freed, or has been changed in place since."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None


class StepLosses:
    """What has shown of the losses of one step function, from its first run on.

    Attributes:
        cycle: the number of runs whose gradients are accumulated for an update; 0 while it is not known.
        waits: whether an update is waited for, when ``cycle`` shows.
        saw_uneven: whether a run was looked at whose shards have different sizes. Means over equal shards are right if
            they are divided by their number; the first uneven batch shows one that is not.
        calls_collectives: whether the step has called a collective.
        has_warned: whether it was warned of a loss.
        passes, rows: of each local replica, in the run that was looked at.
        mixing: what was found of rows in the first run.
    """

    def __init__(self, run: Run, modules: Sequence[MirroredModule]) -> None:
        # Not the function, which would live as long as the strategy.
        self._step, self.replicas = description_of_step(run.fn), run.strategy.num_replicas_in_sync
        self.is_of_user = run.distributed and not is_of_the_package(run.fn)
        # Weak references: this may wait for an update as long as the step function lives.
        self._modules = [ref(module) for module in modules]
        self.cycle, self.saw_uneven = 0, len(set(run.rows)) > 1
        self.waits = self.calls_collectives = self.has_warned = False
        self.passes: Sequence[Passes] = ()
        self.rows: Sequence[int | None] = ()
        self.mixing: Mixing | None = None

    def accumulates(self) -> bool:
        """Whether gradients wait for an update. Until then each copy has those of its replica."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        # An update takes the gradients of all copies away, so those of other copies show one that has not come.
        parameters = [parameter for module in modules for copy in module.copies[1:] for parameter in copy.parameters()]
        self.waits = any(parameter.grad is not None for parameter in parameters)
        return self.waits

    def warn(self, *, cycle: int) -> None:
        """Warns of the losses that were noted, whose gradients are accumulated over ``cycle`` runs."""
        self.cycle = cycle
        if self.is_of_user:
            for message in loss_warnings(self.passes, self.rows, self.replicas, mixing=self.mixing, cycle=cycle):
                self.has_warned = True
                warn_caller(f"{self._step} {message}")


class LossLook(Watcher):
    """Looks at the losses of a step's first run, or of the first one whose shards have different sizes."""

    def __init__(self, losses: StepLosses, run: Run, modules: Sequence[MirroredModule]) -> None:
        self._losses, self._has_others = losses, len(run.rows) > 1
        self._passes = [Passes() for _ in run.rows]
        self._weights = {id(weight) for module in modules for copy in module.copies for weight in copy.parameters()}
        self._saves_by_hooks = False
        self._is_first = not losses.passes

    def torch_called(self, replica: int) -> TorchCalled | None:
        return partial(self._note_hooks, saved_tensors_hooks(True))

    def _note_hooks(self, hooks: Any, *_: Any) -> Any:
        # What hooks have saved, as gradient checkpointing's, would be computed anew if it were looked at.
        self._saves_by_hooks |= saved_tensors_hooks(True) != hooks
        return PROCEED

    def differentiates(self, replica: int, differentiation: Differentiation) -> None:
        if not self._has_others:
            return
        passes, inputs = self._passes[replica], differentiation.inputs
        with _unseen():
            if differentiation.returns:
                weights = [leaf for leaf in inputs or () if isinstance(leaf, Tensor)]
                if any(id(weight) in self._weights for weight in weights):
                    passes.differentiates(differentiation.roots, weights, call_site())
            elif inputs is None:
                passes.begins_at(differentiation.roots, saved=not self._saves_by_hooks)

    def collective_called(self, replica: int, name: str, value: Any) -> None:
        if not self._has_others:
            return
        self._passes[replica].calls_collectives = True
        with _unseen():
            for leaf in tree_leaves(value) if name == "all_reduce" else ():
                if isinstance(leaf, Tensor):
                    self._passes[replica].summed(leaf)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        losses = self._losses
        if error is not None:
            return
        for passes in self._passes:
            passes.forget_graphs()
            losses.calls_collectives |= passes.calls_collectives
        losses.passes, losses.rows = self._passes, run.rows
        if self._is_first:
            losses.warn(cycle=0 if losses.accumulates() else 1)
        else:
            losses.mixing = None
            losses.warn(cycle=losses.cycle)


class UpdateWait(Watcher):
    """Waits in later runs for the update that uses the gradients of the first, when its losses can be judged."""

    def __init__(self, losses: StepLosses, runs: int) -> None:
        self._losses, self._runs = losses, runs

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        if error is None and not self._losses.accumulates() and not self._losses.has_warned:
            self._losses.warn(cycle=self._runs)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hides from the program's modes what is computed here, and ignores errors, as of tensors freed meanwhile."""
    with suppress(Exception), DisableTorchFunction(), torch.no_grad(), disable_dispatch_modes():
        yield
