"""Sums the gradients of all replicas of one process in place, always in replica order.

    within a storage group, slice by slice      between groups, once, by copies or over NCCL
    replica 0 .grad += replica 1 .grad          leader 0 .grad += leader 1's; leader 1 .grad = leader 0's

Each replica of a storage group sums a slice of the parameters, so the work is divided among their threads. The sum is
the leader's ``.grad``; the other members' gradients become None. A parameter without any gradient has none.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from lockstep._torch_compat import foreach_add_, foreach_copy_, foreach_div_, nccl_sums_in_process
from lockstep.mirroring.gradients.bucket_plan import plan_runs, views_of
from lockstep.mirroring.optim.nonfinite import Number
from lockstep.mirroring.zero1 import ShardingGroup
from lockstep.replicas.context import ReplicaContext

SumBetween = Literal["nccl", "copies"]
AllReduce = Callable[[list[torch.Tensor]], None]
"""Given a flat tensor on each GPU: leaves the sum of all in each, behind what is queued on the current streams."""
BUCKET_BYTES = 25 * 2**20
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LOG = logging.getLogger("lockstep")


def choose_sum(devices: Sequence[torch.device], *, nccl: bool) -> SumBetween:
    """How gradients are summed between storages. Pure.

    Args:
        devices: of each storage's leader.
        nccl: whether this torch has NCCL.

    Example:
        >>> choose_sum([torch.device("cuda", 0), torch.device("cuda", 1)], nccl=True)
        'nccl'
    """
    own = len(set(devices)) == len(devices) > 1 and all(device.type == "cuda" for device in devices)
    return "nccl" if own and nccl else "copies"


def has_nccl() -> bool:
    """Whether this torch can sum between the GPUs of a process with NCCL."""
    return nccl_sums_in_process


def sum_by_copies(parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
    """Sums the leaders' gradients on the first one's device and gives every leader the total, on its own.

    Called once, while all replicas wait. Where it can be it is done in the gradients' own memory, so that a share of a
    GPU is charged with its gradients and with nobody else's.
    """
    in_place: list[Copies] = []
    others: list[Copies] = []
    for copies in parameters:
        (in_place if _are_own(copies, leaders) else others).append(copies)
    if in_place:
        own = [[_gradient(copies[leader]) for copies in in_place] for leader in leaders]
        totals, *rest = own
        for gradients in rest:
            foreach_add_(totals, [each.to(total.device) for each, total in zip(gradients, totals, strict=True)])
        for gradients in rest:
            foreach_copy_(gradients, totals)
    for copies in others:
        _sum_into_new(copies, leaders)


def _are_own(copies: Copies, leaders: Sequence[int]) -> bool:
    """Whether every leader has a dense gradient in memory of its own, laid out as the weights are."""
    gradients = [copies[leader].grad for leader in leaders]
    at = {
        gradient.data_ptr()
        for gradient, leader in zip(gradients, leaders, strict=True)
        if gradient is not None and not gradient.is_sparse and _lies_as(gradient, copies[leader])
    }
    return len(at) == len(gradients) and 0 not in at


def _lies_as(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether the elements lie in the same order. What stride a dimension of one element has, says nothing.

    A convolution in channels_last gives 1x1 and depthwise weights gradients of other such strides than theirs.
    """
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(length == 1 or own == theirs for length, own, theirs in strides)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient


def _sum_into_new(copies: Copies, leaders: Sequence[int]) -> None:
    first, *others = leaders
    gradients = [copies[leader].grad for leader in leaders]
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return
    home = copies[first]
    total = present[0].to(home.device, copy=gradients[0] is None)
    for gradient in present[1:]:
        total = total + gradient.to(home.device)
    home.grad = total
    for leader in others:
        copies[leader].grad = total.to(copies[leader].device, copy=True)


class NcclSums:
    """Sums over NCCL. It is called once, while all replicas wait.

    Args:
        all_reduce: the sum of flat tensors; another one where there is no GPU.
        bucket_bytes: the most in a flat tensor, but for one gradient that is larger.
    """

    def __init__(self, all_reduce: AllReduce | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._all_reduce = all_reduce or all_reduce_over_nccl
        self._bucket_bytes = bucket_bytes
        self._works: bool | None = None

    def __call__(self, parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
        """Gives every leader the sums of all leaders' gradients."""
        dense: list[Copies] = []
        others: list[Copies] = []
        for copies in parameters:
            gradients = [copies[leader].grad for leader in leaders]
            if any(gradient is not None for gradient in gradients):
                (dense if all(map(_is_taken, gradients)) else others).append(copies)
        if dense and not self._can_join([dense[0][leader].device for leader in leaders]):
            dense, others = [], [*dense, *others]
        firsts = [copies[leaders[0]] for copies in dense]
        sizes = [first.numel() * first.element_size() for first in firsts]
        for run in plan_runs(sizes, [str(first.dtype) for first in firsts], self._bucket_bytes):
            self._sum([dense[number] for number in run], leaders)
        sum_by_copies(others, leaders)

    def _sum(self, parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
        own = [[copies[leader] for copies in parameters] for leader in leaders]
        flats = [_flat(each) for each in own]
        self._all_reduce(flats)
        for each, flat in zip(own, flats, strict=True):
            for parameter, view in zip(each, views_of(flat, each), strict=True):
                parameter.grad = view

    def _can_join(self, devices: Sequence[torch.device]) -> bool:
        """Whether the GPUs can be joined: tried once, on a number each, before any gradient depends on it."""
        if self._works is None:
            try:
                self._all_reduce([torch.zeros(1, device=device) for device in devices])
                self._works = True
            except RuntimeError as error:
                names = ", ".join(map(str, devices))
                _LOG.warning("NCCL cannot join %s (%s); their gradients are added by copies", names, error)
                self._works = False
        return self._works


def all_reduce_over_nccl(flats: list[torch.Tensor]) -> None:
    """``AllReduce`` over NCCL, from one thread, on the stream that this queues on at each GPU."""
    from torch.cuda import nccl

    nccl.all_reduce(flats)  # type: ignore[no-untyped-call]  # streams=None is the calling thread's current ones


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients of one storage behind each other; zeros where there is none."""
    home = parameters[0]
    flat = torch.empty(sum(each.numel() for each in parameters), dtype=home.dtype, device=home.device)
    pairs = list(zip(views_of(flat, parameters), parameters, strict=True))
    there = [(view, each.grad) for view, each in pairs if each.grad is not None]
    if there:
        foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
    for view, each in pairs:
        if each.grad is None:
            view.zero_()
    return flat


def _is_taken(gradient: torch.Tensor | None) -> bool:
    return gradient is None or (gradient.layout is torch.strided and gradient.dtype in _DTYPES)


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
    def sharing(self) -> ShardingGroup | None:
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
            foreach_add_(into, added)


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
        foreach_div_(dense, divisor)


def _divide_on_device(gradients: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Dense gradients of one device, in one kernel for all of a dtype, which wants the divisor in that dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, group in by_dtype.items():
        foreach_div_(group, divisor.to(group[0].device, dtype, non_blocking=True))
