"""Sums of gradients between the storages of one process: over NCCL where each is on a GPU of its own, else by copies.

    nccl      flat buckets of dense gradients, all GPUs at once        NCCL's order of additions
    copies    to the first leader's device, added there, and back      replica order

NCCL's order follows from the GPUs and the sizes, so a run is repeated bit for bit, and all GPUs get the same bits; but
they may differ from those of copies by rounding. What NCCL does not take, sparse gradients say, is copied then too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from lockstep.mirroring.bucket_plan import plan_runs
from lockstep.mirroring.flat import views_of

if TYPE_CHECKING:
    from lockstep.mirroring.exchange import Copies

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
    return hasattr(torch._C, "_nccl_all_reduce")


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
            torch._foreach_add_(totals, [each.to(total.device) for each, total in zip(gradients, totals, strict=True)])
        for gradients in rest:
            torch._foreach_copy_(gradients, totals)
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
        torch._foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
    for view, each in pairs:
        if each.grad is None:
            view.zero_()
    return flat


def _is_taken(gradient: torch.Tensor | None) -> bool:
    return gradient is None or (gradient.layout is torch.strided and gradient.dtype in _DTYPES)
