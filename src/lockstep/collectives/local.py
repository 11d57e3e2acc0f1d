"""Differentiable all_reduce and all_gather between the replica threads of one process.

The gradient of a sum over replicas is the sum of all replicas' gradients, as in TensorFlow; so the backward pass of a
collective is a collective too, and every replica must run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.collectives.reduction import ReduceOp, gather_values, reduce_values, sum_tensors


class Member(Protocol):
    """A replica taking part: its number, and ``meet``, which all replicas must call with the same name."""

    @property
    def replica_id_in_sync_group(self) -> int: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    def meet(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any: ...


def all_reduce(member: Member, op: ReduceOp, value: Any) -> Any:
    """Sums or averages ``value`` over all replicas; each gets its own copy. Every replica must call it.

    Args:
        member: the calling replica.
        op: sum or mean.
        value: a tensor (any shape, equal on all replicas; differentiable if floating) or a number.

    Raises:
        ConfigError: the shapes differ between replicas.
    """
    name = f"all_reduce({op.value})"
    if not isinstance(value, torch.Tensor):
        return member.meet(name, value, lambda values: reduce_values(op, values))
    total = _AllReduceSum.apply(value, member, name)  # type: ignore[no-untyped-call]
    return total if op is ReduceOp.SUM else total / member.num_replicas_in_sync


def all_gather(member: Member, value: Any, axis: int) -> torch.Tensor:
    """Concatenates ``value`` of all replicas along ``axis``; lengths may differ there. Every replica must call it.

    Raises:
        ConfigError: shapes differ in another dimension, or there is no such dimension.
    """
    gathered: torch.Tensor = _AllGather.apply(torch.as_tensor(value), member, axis)  # type: ignore[no-untyped-call]
    return gathered


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, member: Member, name: str) -> torch.Tensor:
        ctx.member, ctx.name = member, name
        return _own_copy(member.meet(name, value, sum_tensors), value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        total = ctx.member.meet(f"{ctx.name} backward", gradient, sum_tensors)
        return _own_copy(total, gradient), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, member: Member, axis: int) -> torch.Tensor:
        ctx.member, ctx.axis = member, axis

        def combine(values: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
            return gather_values(values, axis), [tensor.shape[axis] for tensor in values]

        gathered, lengths = member.meet(f"all_gather(axis={axis})", value, combine)
        ctx.start = sum(lengths[: member.replica_id_in_sync_group])
        ctx.length = value.shape[axis]
        return _own_copy(gathered, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        total = ctx.member.meet(f"all_gather(axis={ctx.axis}) backward", gradient, sum_tensors)
        return _own_copy(total.narrow(ctx.axis, ctx.start, ctx.length), gradient), None, None


def _own_copy(shared: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The meeting's result is one object for all replicas; each gets its own, on its device."""
    return shared.to(like.device, copy=True)
