"""How the gradients of one optimizer are summed over all replicas; within one process, in the order of ``sum_order``.

    within a storage group, slice by slice             between groups, once
    0 .grad += 1 .grad;  2 .grad += 3 .grad; 0 += 2    the rest of the tree; leader 1 .grad = leader 0 .grad

Each replica of a storage group sums a slice of the parameters. The sum is the leader's ``.grad``; the other members'
gradients become None. ``PartExchange`` is for workers that hold parts of a model: losses are summed over all workers,
gradients over those that hold the same part.
``bucketed_all_reduce`` sums between workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from lockstep._torch_compat import foreach_add_, foreach_div_
from lockstep.collectives.communicator import Communicator, all_gather_object, evaluator_error
from lockstep.collectives.sum_order import Node, add_nodes, leaf_nodes
from lockstep.errors import UsageError
from lockstep.mirroring.zero1 import ShardingGroup
from lockstep.replicas.context import ReplicaContext

Copies = Sequence[nn.Parameter]
"""One parameter's copies, one for each local replica."""
Number = float | torch.Tensor
"""A number that the host knows, or a tensor of one element that a device may still compute."""
Settings = Callable[[], Sequence[str]]
"""Returns an optimizer's settings: a line for its kind, and one for each group of parameters."""
_ROUNDING = 1e-3  # of a gradient's norm; tensor ranks on GPUs may add in another order


class GradientExchange(ABC):
    """How the gradients of one optimizer's parameters are summed over all replicas.

    Attributes:
        is_local: whether the sums are over the replicas of this process alone.
        keeps_sums: whether replica 0, whose gradients are the sums after an update, is one of the local replicas.
        stays_on_device: whether nothing passes through the host, so that totals need not be read, nor ``open`` called.
        sharing: the workers among whom the optimizer's state is sharded; None if each keeps all of it.
        holds: what of the model's weights the optimizer of this worker holds, in words; empty for all of them.
    """

    is_local = False
    keeps_sums = True
    stays_on_device = False
    holds: str = ""
    sharing: ShardingGroup | None = None

    @abstractmethod
    def open(self, totals: Sequence[tuple[float, float]], settings: Settings) -> tuple[float, float]:
        """The total and the count over all replicas, given each local replica's. Called once, while these wait.

        ``settings`` returns the optimizer's settings, which must be equal on all workers.
        """

    @abstractmethod
    def run(self, context: ReplicaContext, indices: Sequence[int]) -> None:
        """Leaves the sums of a slice of the parameters in the leaders' ".grad". Every replica must call it."""

    def run_at_once(self) -> None:
        """The same of all parameters, called once, while the replicas wait. Where the sums are local only."""
        raise NotImplementedError

    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The norm of all summed gradients of the model, given each parameter's; called once, while replicas wait."""
        in_order = [norms[index] for index in sorted(norms)]
        return torch.linalg.vector_norm(torch.stack(in_order)) if in_order else torch.zeros(())

    def sending_paused(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which no backward pass of these local replicas sends gradients to other workers."""
        return nullcontext()


MakeExchange = Callable[[Sequence[Copies], Sequence[Sequence[int]]], GradientExchange]
"""Makes the exchange of gradients, given the copies of the parameters and the storage groups."""


class LocalExchange(GradientExchange):
    """Sums gradients between the replicas of one process, with the same bits however they are laid on devices."""

    stays_on_device = is_local = True

    def __init__(self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> None:
        self._parameters = parameters
        self._groups = {member: tuple(group) for group in groups for member in group}
        self._leaders = tuple(group[0] for group in groups)
        replicas = len(self._groups)
        self._additions = {member: _additions(leaf_nodes(group), replicas) for member, group in self._groups.items()}
        group_sums = (add_nodes(leaf_nodes(group), replicas, lambda one, _: one) for group in groups)
        self._additions_between_groups = _additions(sorted(node for nodes in group_sums for node in nodes), replicas)
        self._additions_of_totals = _additions(leaf_nodes(range(replicas)), replicas)

    def open(self, totals: Sequence[tuple[float, float]], settings: Settings) -> tuple[float, float]:
        sums = list(totals)
        for into, other in self._additions_of_totals:
            sums[into] = (sums[into][0] + sums[other][0], sums[into][1] + sums[other][1])
        return sums[0]

    def run(self, context: ReplicaContext, indices: Sequence[int]) -> None:
        parameters = [self._parameters[index] for index in indices]
        self._add_up(self._additions[context.local_replica], parameters)
        if len(self._leaders) > 1:
            context.meet("gradient exchange", None, lambda _: self._sum_between_groups())

    def run_at_once(self) -> None:
        for leader in self._leaders:
            self._add_up(self._additions[leader], self._parameters)
        if len(self._leaders) > 1:
            self._sum_between_groups()

    def _sum_between_groups(self) -> None:
        self._add_up(self._additions_between_groups, self._parameters)
        spread(self._parameters, self._leaders)

    def _add_up(self, additions: Sequence[tuple[int, int]], parameters: Sequence[Copies]) -> None:
        for into, other in additions:
            # A leader keeps its gradients: ``spread`` writes the sums into their memory.
            add_gradients(parameters, into, other, keep=other in self._leaders)


def _additions(parts: Iterable[tuple[Node, int]], replicas: int) -> list[tuple[int, int]]:
    """The order in which the tree adds: pairs of a replica that has the sum so far, and one that is added to it.

    The value of a node is the replica whose gradients are its sum. Found once: the tree is the same in every step.
    """
    additions: list[tuple[int, int]] = []

    def add(into: int, other: int) -> int:
        additions.append((into, other))
        return into

    add_nodes(parts, replicas, add)
    return additions


class EvaluatorExchange(LocalExchange):
    """That of an evaluator, which takes no part in the training: its optimizers make no update."""

    is_local = False

    def open(self, totals: Sequence[tuple[float, float]], settings: Settings) -> tuple[float, float]:
        """Raises a UsageError."""
        raise evaluator_error("the update of an optimizer")


@dataclass(kw_only=True, eq=False)
class PartExchange(GradientExchange):
    """Between workers that hold parts of the model.

    Args:
        between_replicas: how the gradients of this part are summed.
        workers: the replicas, each seen as one worker.
        holders: the workers that hold the summed gradients together.
        counted: the numbers of the parameters whose gradients count here for the norm of the whole model's.
        tied: those that another stage holds too, in an order that is the same there.
        tied_group: this worker and the one that holds the same tied weights; None if there is none.
        sharing: the workers that hold this part, if the optimizer's state is sharded among them.
        whole: by name, the parameters that all tensor ranks of this part hold alike; None without tensor ranks.
        part: the replica and the stage that these tensor ranks divide.
        holds: what of the model's weights is here, in words; empty for all of them.
    """

    between_replicas: GradientExchange
    workers: Communicator
    holders: Communicator
    counted: frozenset[int]
    tied: Sequence[nn.Parameter] = ()
    tied_group: Communicator | None = None
    sharing: ShardingGroup | None = None
    whole: Mapping[str, nn.Parameter] | None = None
    part: tuple[int, int] = (0, 0)
    holds: str = ""

    def __post_init__(self) -> None:
        self.keeps_sums = self.workers.leads
        self._compared = False

    def open(self, totals: Sequence[tuple[float, float]], settings: Settings) -> tuple[float, float]:
        total, count = self.workers.sum_numbers("optimizer update", totals)
        self.between_replicas.open([(0.0, 0.0)] * len(totals), settings)
        self._sum_tied()
        return total, count

    def run(self, context: ReplicaContext, indices: Sequence[int]) -> None:
        self.between_replicas.run(context, indices)
        # In the first update only: a wrong tensor plan is wrong from the start, and the exchange waits for all ranks.
        if self.whole is not None and not self._compared:
            self._compared = True
            self._compare_whole(self.whole)

    def _compare_whole(self, whole: Mapping[str, nn.Parameter]) -> None:
        """Raises a UsageError on all workers if tensor ranks have different gradients of a weight that each holds."""
        summaries = {name: _summary(parameter.grad) for name, parameter in whole.items()}
        gathered = all_gather_object(
            self.holders, "gradients of whole weights", {"part": self.part, "gradients": summaries}
        )
        first: dict[tuple[int, int], Mapping[str, tuple[float, float]]] = {}
        for rank in gathered:
            expected = first.setdefault(rank["part"], rank["gradients"])
            for name, summary in rank["gradients"].items():
                if not _are_close(summary, expected[name]):
                    raise UsageError(
                        f"the gradient of {name!r}, which every tensor rank holds whole, differs between them (norms "
                        f"{summary[1]:.6g} and {expected[name][1]:.6g}): the tensor plan calls its module on a part of "
                        "the activations; give the layer before it output_layouts=Replicate() and the one after it "
                        "input_layouts=Replicate(), or divide the module too"
                    )

    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The same bits on all workers."""
        # In double precision, added in the order of workers: all get the same bits, and so the same clipping.
        counted = [norms[index].double() for index in sorted(norms) if index in self.counted]
        # One stacked tensor is read, so that the host waits for a GPU once.
        local_square = sum(norm**2 for norm in torch.stack(counted).tolist()) if counted else 0.0
        squares = [square for (square,) in self.holders.all_gather_numbers("gradient norm", [local_square])]
        return torch.tensor(sum(squares), dtype=torch.float64).sqrt()

    def _sum_tied(self) -> None:
        """Gives one weight that two stages hold the sum of both gradients, with the same bits on both."""
        if self.tied_group is None or not self.tied:
            return
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self.tied
        ]
        summed = self.tied_group.all_reduce("gradients of tied weights", [gradients])
        for parameter, gradient in zip(self.tied, summed, strict=True):
            parameter.grad = gradient

    def sending_paused(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        return self.between_replicas.sending_paused(replicas)


def _summary(gradient: torch.Tensor | None) -> tuple[float, float]:
    """The sum and the norm of a gradient."""
    if gradient is None:
        return 0.0, 0.0
    precise = (gradient.to_dense() if gradient.is_sparse else gradient.detach()).double()
    return float(precise.sum()), float(torch.linalg.vector_norm(precise))


def _are_close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two summaries differ by no more than rounding. Gradients with inf or NaN are not compared."""
    if not all(map(math.isfinite, (*one, *other))):
        return True
    return all(abs(a - b) <= _ROUNDING * max(one[1], other[1]) for a, b in zip(one, other, strict=True))


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive parts of ``flat``, contiguous, in the shapes and memory formats of the parameters."""
    numbers = [parameter.numel() for parameter in parameters]
    # With the strides of the parameters: else "foreach" and fused kernels on GPUs go tensor by tensor (torch 2.13,
    # ForeachUtils.h: the fast path needs equal strides).
    parts = flat[: sum(numbers)].split(numbers)  # type: ignore[no-untyped-call]
    return [
        part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        if _is_channels_last(parameter)
        else part.view(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def _is_channels_last(parameter: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(parameter.ndim)
    return layout is not None and parameter.is_contiguous(memory_format=layout)


def add_gradients(parameters: Sequence[Copies], into: int, other: int, *, keep: bool = False) -> None:
    """Adds the gradients of replica ``other`` to those of ``into``, on its device; the former become None or stay."""
    totals: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for copies in parameters:
        gradient = copies[other].grad
        if gradient is None:
            continue
        total, moved = copies[into].grad, gradient.to(copies[into].device)
        if not keep:
            copies[other].grad = None
        if total is None:
            copies[into].grad = moved.clone() if keep and moved is gradient else moved
        elif moved.is_sparse or total.is_sparse or moved is total:
            # torch adds a sparse tensor to a dense one only, and the one that is dense comes first
            copies[into].grad = moved + total if total.is_sparse else total + moved
        else:
            totals.append(total)
            added.append(moved)
    if totals:
        foreach_add_(totals, added)


def spread(parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
    """Gives all leaders copies of the first one's gradients. Called once, while the replicas wait.

    In the memory of their own gradients if they have some, which is charged to their share of a GPU.
    """
    first, *followers = leaders
    for copies in parameters if followers else ():
        gradient = copies[first].grad
        # A program may have set one tensor as ".grad" in several replicas: divided once for each it would be too small.
        written = {id(gradient)}
        for leader in followers:
            target = copies[leader].grad
            if gradient is None or target is None or id(target) in written or not _can_hold(target, gradient):
                copies[leader].grad = None if gradient is None else gradient.to(copies[leader].device, copy=True)
            else:
                target.detach().copy_(gradient)
                written.add(id(target))


def _can_hold(target: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient's memory can take another's values: not if it is sparse, or expanded."""
    dense = target.layout is torch.strided and gradient.layout is torch.strided
    return dense and target.dtype == gradient.dtype and target.nbytes <= target.untyped_storage().nbytes()


def has_gradients(parameters: Iterable[Copies], replicas: slice = slice(None)) -> bool:
    """Whether any of these local replicas has a gradient of any of the parameters."""
    # Loops, since this is asked several times around every run: any() over a generator takes twice as long.
    for copies in parameters:
        for parameter in copies[replicas]:
            if parameter.grad is not None:
                return True
    return False


def gradients_of(parameters: Sequence[Copies], replica: int) -> list[torch.Tensor]:
    """The gradients that ``replica`` holds for ``parameters``, without those that are None."""
    return [gradient for copies in parameters if (gradient := copies[replica].grad) is not None]


def divide(gradients: Sequence[torch.Tensor], divisor: Number) -> None:
    """Divides gradients in place by the total count. A divisor that is a tensor is not read."""
    if isinstance(divisor, torch.Tensor):  # all are dense, on one device; a kernel needs the divisor in their dtype
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, group in by_dtype.items():
            foreach_div_(group, divisor.to(group[0].device, dtype, non_blocking=True))
        return
    if divisor == 1.0:  # every step of a loop of the user's, which has divided the loss itself
        return
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.div_(divisor)
    if dense:
        foreach_div_(dense, divisor)
