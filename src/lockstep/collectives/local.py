"""Differentiable all_reduce and all_gather between replicas: the threads of this process, then all workers.

The gradient of a sum over replicas is the sum of all replicas' gradients, as in TensorFlow; so the backward pass of a
collective is a collective too, and every replica must run it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from lockstep.collectives.across import gather_across, reduce_across, sum_across
from lockstep.collectives.reads_as_tensor import as_read
from lockstep.collectives.reduction import ReduceOp
from lockstep.collectives.summed import refuse_summed
from lockstep.collectives.workers import Workers


class Member(Protocol):
    """A replica taking part: its numbers, and ``meet``, which all local replicas must call with the same name."""

    @property
    def replica_id_in_sync_group(self) -> int: ...

    @property
    def local_replica(self) -> int: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def workers(self) -> Workers: ...

    def meet(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any: ...


def all_reduce(member: Member, op: ReduceOp, value: Any) -> Any:
    """Sums or averages ``value`` over all replicas; each gets its own copy. Every replica must call it.

    Args:
        member: the calling replica.
        op: sum or mean.
        value: a tensor (any shape, equal on all replicas; differentiable if floating) or a number.

    Raises:
        ConfigError: the shapes differ between replicas.
        UsageError: the sum of a gradient that is a sum over all replicas already.
    """
    value, name = as_read(value), f"all_reduce({op.value})"
    if op is ReduceOp.SUM:
        refuse_summed(name, [value])
    if not isinstance(value, torch.Tensor):
        return member.meet(name, value, lambda values: reduce_across(member.workers, op, values))
    total = _AllReduceSum.apply(value, member, name)  # type: ignore[no-untyped-call]
    return total if op is ReduceOp.SUM else total / member.num_replicas_in_sync


def all_gather(member: Member, value: Any, axis: int) -> torch.Tensor:
    """Concatenates ``value`` of all replicas along ``axis``; lengths may differ there. Every replica must call it.

    Raises:
        ConfigError: shapes differ in another dimension, or there is no such dimension.
    """
    gathered: torch.Tensor = _AllGather.apply(torch.as_tensor(as_read(value)), member, axis)  # type: ignore[no-untyped-call]
    return gathered


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, member: Member, name: str) -> torch.Tensor:
        ctx.member, ctx.name = member, name
        return _own_copy(member.meet(name, value, partial(sum_across, member.workers, name)), value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        name = f"{ctx.name} backward"
        total = ctx.member.meet(name, gradient, partial(sum_across, ctx.member.workers, name))
        return _own_copy(total, gradient), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, member: Member, axis: int) -> torch.Tensor:
        ctx.member, ctx.axis = member, axis

        name = f"all_gather(axis={axis})"

        def combine(values: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
            gathered = gather_across(member.workers, name, values, axis)
            local = [tensor.shape[axis] for tensor in values]
            met = member.workers.exchange(f"{name} lengths", [sum(local)])
            first = int(sum(rows for (rows,) in met[: member.workers.index]))
            return gathered, [first + sum(local[:replica]) for replica in range(len(local))]

        gathered, begins = member.meet(name, value, combine)
        ctx.start = begins[member.local_replica]
        ctx.length = value.shape[axis]
        return _own_copy(gathered, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        name = f"all_gather(axis={ctx.axis}) backward"
        total = ctx.member.meet(name, gradient, partial(sum_across, ctx.member.workers, name))
        return _own_copy(total.narrow(ctx.axis, ctx.start, ctx.length), gradient), None, None


def _own_copy(shared: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The meeting's result is one object for all replicas; each gets its own, on its device."""
    return shared.to(like.device, copy=True)
