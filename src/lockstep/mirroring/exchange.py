"""The exchange: gradients of all replicas are summed, always in replica order. Here: those of one process, in place.

    within a storage group, slice by slice      between groups, once, by copies or over NCCL (device_sums)
    replica 0 .grad += replica 1 .grad          leader 0 .grad += leader 1's; leader 1 .grad = leader 0's

Replicas of one group each sum a slice of the parameters, so the work is spread over their threads. The sum ends in the
leader's ``.grad``; the other members' gradients become None. A parameter without a gradient anywhere keeps none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lockstep.mirroring.device_sums import NcclSums, choose_sum, has_nccl, sum_by_copies
from lockstep.mirroring.sharing import Sharing
from lockstep.mirroring.skipping import Number
from lockstep.replicas.context import ReplicaContext

Copies = Sequence[nn.Parameter]
"""One parameter's copies, one per local replica."""


Settings = Callable[[], Sequence[str]]
"""Gives an optimizer's settings: a line for its kind, and one for each group of parameters."""


class GradientExchange(ABC):
    """How the gradients of one optimizer's parameters are summed over all replicas."""

    @abstractmethod
    def open(self, total: float, count: float, settings: Settings) -> tuple[float, float]:
        """The total and the count over all replicas, given the local replicas' sums. Called once, while these wait.

        Args:
            total: the sum of the local replicas' losses.
            count: what the summed loss is to be divided by, of the local replicas.
            settings: gives the optimizer's settings, which must be equal on all workers.
        """

    @abstractmethod
    def run(self, context: ReplicaContext, mine: Sequence[int]) -> None:
        """Leaves the sums in the leaders' ".grad" and no gradient in the others'. Every replica must call it.

        Args:
            context: the calling replica's.
            mine: the numbers of the parameters that this replica looks after.
        """

    @abstractmethod
    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The norm of all summed gradients of the model, given each parameter's; called once, while replicas wait."""

    def held(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """Inside the block no backward pass of these local replicas sends gradients to other workers.

        Here: none does.
        """
        return nullcontext()

    @property
    @abstractmethod
    def keeps_sums(self) -> bool:
        """Whether replica 0, whose gradients are the sums after an update, is one of the local replicas."""

    @property
    def stays_on_device(self) -> bool:
        """Whether nothing passes through the host: sums that nobody has read will do, and ``open`` is not needed."""
        return False

    @property
    def sharing(self) -> Sharing | None:
        """The workers among whom the optimizer's state is divided; None where each keeps all of it."""
        return None


class LocalExchange(GradientExchange):
    """Between the replicas of one process.

    Args:
        parameters: per parameter its copies.
        groups: the replicas by storage of the weights; the first of each leads it.
    """

    def __init__(self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> None:
        self._parameters = parameters
        self._groups = {member: tuple(group) for group in groups for member in group}
        self._leaders = tuple(group[0] for group in groups)
        devices = [parameters[0][leader].device for leader in self._leaders] if parameters else []
        over_nccl = choose_sum(devices, nccl=has_nccl()) == "nccl"
        self._sum_between = NcclSums() if over_nccl else sum_by_copies

    def open(self, total: float, count: float, settings: Settings) -> tuple[float, float]:
        """There are no others."""
        return total, count

    def run(self, context: ReplicaContext, mine: Sequence[int]) -> None:
        """Sums a slice within the replica's storage group, then all slices between groups."""
        sum_within_group([self._parameters[index] for index in mine], self._groups[context.local_replica])
        if len(self._leaders) > 1:
            context.meet("gradient exchange", None, lambda _: self._sum_between(self._parameters, self._leaders))

    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """All are here."""
        return joined_norm(norms)

    @property
    def keeps_sums(self) -> bool:
        """Replica 0 is here."""
        return True

    @property
    def stays_on_device(self) -> bool:
        """All replicas are here."""
        return True


def sum_within_group(parameters: Sequence[Copies], members: Sequence[int]) -> None:
    """Sums the gradients of ``members`` into the first member's ``.grad``, parameter by parameter.

    Args:
        parameters: the copies of each parameter of this slice.
        members: the replicas that share one storage; the first is the leader.
    """
    leader, *others = members
    for other in others:
        into: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for copies in parameters:
            gradient = copies[other].grad
            if gradient is None:
                continue
            total = copies[leader].grad
            if total is None:
                copies[leader].grad = gradient
            elif gradient.is_sparse or total.is_sparse:
                copies[leader].grad = total + gradient
            else:
                into.append(total)
                added.append(gradient)
            copies[other].grad = None
        if into:
            torch._foreach_add_(into, added)


def joined_norm(norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The norm of several tensors together, given each one's norm by the number of its parameter."""
    in_order = [norms[index] for index in sorted(norms)]
    return torch.linalg.vector_norm(torch.stack(in_order)) if in_order else torch.zeros(())


def gradients_of(parameters: Sequence[Copies], replica: int) -> list[torch.Tensor]:
    """The gradients that ``replica`` holds for ``parameters``, without those that have none."""
    return [gradient for copies in parameters if (gradient := copies[replica].grad) is not None]


def divide(gradients: Sequence[torch.Tensor], divisor: Number) -> None:
    """Divides gradients in place by the total count, once. One that is a tensor is not read."""
    if isinstance(divisor, torch.Tensor):
        _divide_on_device(gradients, divisor)
        return
    if divisor == 1.0 or not gradients:
        return
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.div_(divisor)
    if dense:
        torch._foreach_div_(dense, divisor)


def _divide_on_device(gradients: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Dense gradients of one device, in one kernel for all of a dtype, which wants the divisor in that dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, group in by_dtype.items():
        torch._foreach_div_(group, divisor.to(group[0].device, dtype, non_blocking=True))
