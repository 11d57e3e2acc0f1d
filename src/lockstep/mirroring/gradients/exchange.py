"""How the gradients of one optimizer are summed over all replicas; within one process, always in replica order.

    within a storage group, slice by slice      between groups, once, by copies or over NCCL
    replica 0 .grad += replica 1 .grad          leader 0 .grad += leader 1's; leader 1 .grad = leader 0's

Each replica of a storage group sums a slice of the parameters, so the work is divided among their threads. The sum is
the leader's ``.grad``; the other members' gradients become None. A parameter without any gradient has none.
``buckets`` sums between workers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lockstep._torch_compat import foreach_add_, foreach_copy_, foreach_div_, nccl_sums_in_process
from lockstep.collectives.communicator import Communicator
from lockstep.mirroring.zero1 import ShardingGroup
from lockstep.replicas.context import ReplicaContext

Copies = Sequence[nn.Parameter]
"""One parameter's copies, one for each local replica."""
Number = float | torch.Tensor
"""A number that the host knows, or a tensor of one element that a device may still compute."""
Settings = Callable[[], Sequence[str]]
"""Returns an optimizer's settings: a line for its kind, and one for each group of parameters."""
AllReduce = Callable[[list[torch.Tensor]], None]
"""Given a flat tensor on each GPU: leaves the sum of all in each, behind what is queued on the current streams."""
BUCKET_BYTES = 25 * 2**20
_NCCL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LOG = logging.getLogger("lockstep")


class GradientExchange(ABC):
    """How the gradients of one optimizer's parameters are summed over all replicas.

    Attributes:
        keeps_sums: whether replica 0, whose gradients are the sums after an update, is one of the local replicas.
        stays_on_device: whether nothing passes through the host, so that totals need not be read, nor ``open`` called.
        sharing: the workers among whom the optimizer's state is sharded; None if each keeps all of it.
    """

    keeps_sums = True
    stays_on_device = False
    sharing: ShardingGroup | None = None

    @abstractmethod
    def open(self, total: float, count: float, settings: Settings) -> tuple[float, float]:
        """The total and the count over all replicas, given the local replicas' sums. Called once, while these wait.

        ``settings`` returns the optimizer's settings, which must be equal on all workers.
        """

    @abstractmethod
    def run(self, context: ReplicaContext, mine: Sequence[int]) -> None:
        """Leaves the sums of a slice of the parameters in the leaders' ".grad". Every replica must call it."""

    @abstractmethod
    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The norm of all summed gradients of the model, given each parameter's; called once, while replicas wait."""

    def held(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which no backward pass of these local replicas sends gradients to other workers."""
        return nullcontext()


class LocalExchange(GradientExchange):
    """Sums gradients between the replicas of one process; each sum is made on the first replica of its group."""

    stays_on_device = True

    def __init__(self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> None:
        self._parameters = parameters
        self._groups = {member: tuple(group) for group in groups for member in group}
        self._leaders = tuple(group[0] for group in groups)
        devices = [parameters[0][leader].device for leader in self._leaders] if parameters else []
        over_nccl = choose_sum(devices, nccl=nccl_sums_in_process) == "nccl"
        self._sum_between = NcclSums() if over_nccl else sum_by_copies

    def open(self, total: float, count: float, settings: Settings) -> tuple[float, float]:
        return total, count

    def run(self, context: ReplicaContext, mine: Sequence[int]) -> None:
        _sum_within_group([self._parameters[index] for index in mine], self._groups[context.local_replica])
        if len(self._leaders) > 1:
            context.meet("gradient exchange", None, lambda _: self._sum_between(self._parameters, self._leaders))

    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return joined_norm(norms)


@dataclass(kw_only=True, eq=False)
class PartExchange(GradientExchange):
    """Between workers that hold parts of the model.

    losses and counts   over all workers: those that have the model's outputs send them to the others
    gradients           over the workers that hold the same part, one for each replica; of tied weights, over two stages
    norm                over the workers of one replica; parameters that several of them hold count once

    Args:
        between_replicas: how the gradients of this part are summed.
        workers: the replicas, each seen as one worker.
        holders: the workers that hold the summed gradients together.
        counted: the numbers of the parameters whose gradients count here for the norm of the whole model's.
        tied: those that another stage holds too, in an order that is the same there.
        tied_group: this worker and the one that holds the same tied weights; None if there is none.
        sharing: the workers that hold this part, if the optimizer's state is sharded among them.
    """

    between_replicas: GradientExchange
    workers: Communicator
    holders: Communicator
    counted: frozenset[int]
    tied: Sequence[nn.Parameter] = ()
    tied_group: Communicator | None = None
    sharing: ShardingGroup | None = None

    def __post_init__(self) -> None:
        self.keeps_sums = self.workers.is_chief

    def open(self, total: float, count: float, settings: Settings) -> tuple[float, float]:
        gathered = self.workers.all_gather_numbers("optimizer update", [total, count])
        self.between_replicas.open(0.0, 0.0, settings)
        self._sum_tied()
        return sum(each for each, _ in gathered), sum(each for _, each in gathered)

    def run(self, context: ReplicaContext, mine: Sequence[int]) -> None:
        self.between_replicas.run(context, mine)

    def norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The same bits on all workers."""
        counted = [norms[index].double() for index in sorted(norms) if index in self.counted]
        # One stacked tensor is read, so that the host waits for a GPU once.
        own = sum(norm**2 for norm in torch.stack(counted).tolist()) if counted else 0.0
        squares = [square for (square,) in self.holders.all_gather_numbers("gradient norm", [own])]
        return torch.tensor(sum(squares), dtype=torch.float64).sqrt()

    def _sum_tied(self) -> None:
        """Gives one weight that two stages hold the sum of both gradients, with the same bits on both."""
        if self.tied_group is None or not self.tied:
            return
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.tied]
        summed = self.tied_group.all_reduce("gradients of tied weights", gradients)
        for parameter, gradient in zip(self.tied, summed, strict=True):
            parameter.grad = gradient

    def held(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        return self.between_replicas.held(replicas)


def choose_sum(devices: Sequence[torch.device], *, nccl: bool) -> Literal["nccl", "copies"]:
    """How gradients are summed between storages, given the device of each one's leader.

    Example:
        >>> choose_sum([torch.device("cuda", 0), torch.device("cuda", 1)], nccl=True)
        'nccl'
    """
    different = len(set(devices)) == len(devices) > 1 and all(device.type == "cuda" for device in devices)
    return "nccl" if different and nccl else "copies"


def sum_by_copies(parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
    """Gives every leader the sum of the leaders' gradients, added on the first one's device. Called once.

    In the gradients' own memory if possible, so that no share of a GPU is charged with another's gradients.
    """
    in_place: list[Copies] = []
    others: list[Copies] = []
    for copies in parameters:
        (in_place if _are_own(copies, leaders) else others).append(copies)
    if in_place:
        totals, *rest = [gradients_of(in_place, leader) for leader in leaders]
        for gradients in rest:
            foreach_add_(totals, [each.to(total.device) for each, total in zip(gradients, totals, strict=True)])
        for gradients in rest:
            foreach_copy_(gradients, totals)
    for copies in others:
        _sum_into_new(copies, leaders)


def _are_own(copies: Copies, leaders: Sequence[int]) -> bool:
    """Whether every leader has a dense gradient in memory of its own, laid out as the weights are."""
    gradients = [copies[leader].grad for leader in leaders]
    addresses = {
        gradient.data_ptr()
        for gradient, leader in zip(gradients, leaders, strict=True)
        if gradient is not None and not gradient.is_sparse and _has_layout_of(gradient, copies[leader])
    }
    return len(addresses) == len(gradients) and 0 not in addresses


def _has_layout_of(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether the elements lie in the same order; the stride of a dimension of one element says nothing."""
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(length == 1 or own == theirs for length, own, theirs in strides)


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
    """Sums over NCCL, in flat tensors of at most ``bucket_bytes``, except for one gradient that is larger."""

    def __init__(self, all_reduce: AllReduce | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._all_reduce = all_reduce or _all_reduce_over_nccl
        self._bucket_bytes = bucket_bytes
        self._works: bool | None = None

    def __call__(self, parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
        """Gives every leader the sums of all leaders' gradients. Called once, while all replicas wait."""
        dense: list[Copies] = []
        others: list[Copies] = []
        for copies in parameters:
            gradients = [copies[leader].grad for leader in leaders]
            if any(gradient is not None for gradient in gradients):
                (dense if all(map(_can_use_nccl, gradients)) else others).append(copies)
        if dense and not self._connects([dense[0][leader].device for leader in leaders]):
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

    def _connects(self, devices: Sequence[torch.device]) -> bool:
        """Whether NCCL can connect the GPUs: tried once, on a number each, before any gradient depends on it."""
        if self._works is None:
            try:
                self._all_reduce([torch.zeros(1, device=device) for device in devices])
                self._works = True
            except RuntimeError as error:
                names = ", ".join(map(str, devices))
                _LOG.warning("NCCL cannot join %s (%s); their gradients are added by copies", names, error)
                self._works = False
        return self._works


def _all_reduce_over_nccl(flats: list[torch.Tensor]) -> None:
    """``AllReduce`` over NCCL, from one thread, on the stream that this queues on at each GPU."""
    from torch.cuda import nccl

    nccl.all_reduce(flats)  # type: ignore[no-untyped-call]  # streams=None is the calling thread's current ones


def _can_use_nccl(gradient: torch.Tensor | None) -> bool:
    return gradient is None or (gradient.layout is torch.strided and gradient.dtype in _NCCL_DTYPES)


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients of one storage in one flat tensor; zeros for those that are None."""
    home = parameters[0]
    flat = torch.empty(sum(each.numel() for each in parameters), dtype=home.dtype, device=home.device)
    pairs = [(view, each.grad) for view, each in zip(views_of(flat, parameters), parameters, strict=True)]
    present = [(view, gradient) for view, gradient in pairs if gradient is not None]
    if present:
        foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
    for view, gradient in pairs:
        if gradient is None:
            view.zero_()
    return flat


def plan_runs(sizes: Sequence[int], kinds: Sequence[str], most_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Which gradients share a flat tensor between the devices of one process, where nothing is computed meanwhile.

    A gradient larger than ``most_bytes`` is alone. The runs of a kind, which is a dtype, are together.

    Example:
        >>> plan_runs([4, 4, 4, 9], ["a", "b", "a", "a"], 8)
        ((0, 2), (3,), (1,))
    """
    runs: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        left = -1
        for number in (number for number, own in enumerate(kinds) if own == kind):
            if sizes[number] > left:
                runs.append([])
                left = most_bytes
            runs[-1].append(number)
            left -= sizes[number]
    return tuple(map(tuple, runs))


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive parts of ``flat``, contiguous, in the shapes and memory formats of the parameters."""
    numbers = [parameter.numel() for parameter in parameters]
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


def _sum_within_group(parameters: Sequence[Copies], members: Sequence[int]) -> None:
    """Sums the gradients of the group's members into its first member's ``.grad``, parameter by parameter."""
    leader, *others = members
    for other in others:
        totals: list[torch.Tensor] = []
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
                totals.append(total)
                added.append(gradient)
            copies[other].grad = None
        if totals:
            foreach_add_(totals, added)


def joined_norm(norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The norm of several tensors together, given each one's norm by the number of its parameter."""
    in_order = [norms[index] for index in sorted(norms)]
    return torch.linalg.vector_norm(torch.stack(in_order)) if in_order else torch.zeros(())


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
    if divisor == 1.0:
        return
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.div_(divisor)
    if dense:
        foreach_div_(dense, divisor)
