"""Differentiable all_reduce and all_gather between replicas: the threads of this process, then all workers.

The gradient of a sum over replicas is the sum of all replicas' gradients, as in TensorFlow; so the backward pass of a
collective is a collective too, and every replica must run it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from lockstep.collectives.communicator import Communicator
from lockstep.collectives.tensor_like import read_tensors
from lockstep.errors import ConfigError, UsageError


class ReduceOp(enum.Enum):
    """How values of several replicas become one."""

    SUM = "sum"
    MEAN = "mean"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The operation named ``op``, "sum" or "mean" in any case.

        Raises:
            ConfigError: no such operation.
        """
        if isinstance(op, cls):
            return op
        try:
            return cls(op.lower() if isinstance(op, str) else op)
        except ValueError:
            known = ", ".join(repr(member.value) for member in cls)
            raise ConfigError(f"unknown reduction {op!r}; choose one of {known} or a ReduceOp") from None


def reduce_values(op: ReduceOp | str, values: Sequence[Any], axis: int | None = None) -> Any:
    """Reduces one value per replica to one value.

    Args:
        op: "sum" or "mean".
        values: tensors, numbers or lists of numbers, one per replica, in replica order. Without an axis tensors must
            have one shape; with an axis that dimension may differ in length.
        axis: None adds the values elementwise. A dimension adds within each value along it first; the mean is then
            the total sum over the total count, so that uneven shards come out right.

    Returns:
        A number if all values are numbers and ``axis`` is None, else a tensor on the first value's device.

    Raises:
        ConfigError: shapes that do not fit, or an axis that a value does not have.
    """
    op = ReduceOp.of(op)
    if axis is None and all(isinstance(value, (int, float)) for value in values):
        total = sum(values)
        return total if op is ReduceOp.SUM else total / len(values)
    tensors = [as_tensor(value) for value in values]
    if axis is None:
        total = sum_tensors(tensors)
        return total if op is ReduceOp.SUM else total / len(tensors)
    counts = [length(tensor, axis) for tensor in tensors]
    total = sum_tensors([tensor.sum(dim=axis) for tensor in tensors])
    return total if op is ReduceOp.SUM else total / sum(counts)


def sum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elementwise sum, on the first tensor's device, added in the order given. Booleans are counted.

    Raises:
        ConfigError: the shapes differ.
    """
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"cannot add values of shapes {shapes}, one per replica; give all replicas the same shape, "
            "or name the axis whose length differs"
        )
    total = first.long() if first.dtype == torch.bool else first.clone()
    for tensor in tensors[1:]:
        total = total + tensor.to(total.device)
    return total


def gather_values(values: Sequence[Any], axis: int) -> torch.Tensor:
    """Concatenates one value per replica along ``axis``, in replica order, on the first value's device.

    Raises:
        ConfigError: a value without that dimension, or shapes that differ in another one.
    """
    tensors = [as_tensor(value) for value in values]
    for tensor in tensors:
        length(tensor, axis)
    rests = {_without(tuple(tensor.shape), axis) for tensor in tensors}
    if len(rests) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(f"cannot gather shapes {shapes} along axis {axis}; they may differ in that dimension only")
    return torch.cat([tensor.to(tensors[0].device) for tensor in tensors], dim=axis)


def as_tensor(value: Any) -> torch.Tensor:
    """A replica's value as a tensor.

    Raises:
        ConfigError: it is none, and cannot become one.
    """
    try:
        return torch.as_tensor(read_tensors(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot reduce a {type(value).__name__}; give tensors or numbers ({error})") from error


def length(tensor: torch.Tensor, axis: int) -> int:
    """The length of dimension ``axis``.

    Raises:
        ConfigError: there is no such dimension.
    """
    if not -tensor.ndim <= axis < tensor.ndim:
        raise ConfigError(
            f"axis {axis} does not exist in a value of shape {tuple(tensor.shape)}; "
            + ("give values of at least one dimension" if tensor.ndim == 0 else f"choose 0 to {tensor.ndim - 1}")
        )
    return tensor.shape[axis]


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    axis %= len(shape)
    return shape[:axis] + shape[axis + 1 :]


_MARK = "_lockstep_summed"


def mark_summed(gradient: torch.Tensor) -> None:
    """Notes that ``gradient`` is the sum over all replicas."""
    setattr(gradient, _MARK, True)


def refuse_summed(what: str, values: Iterable[Any]) -> None:
    """Called before values are added up over the replicas.

    Args:
        what: is about to add them up.
        values: any objects.

    Raises:
        UsageError: one of them is a gradient that was added up before.
    """
    for value in values:
        if isinstance(value, torch.Tensor) and getattr(value, _MARK, False):
            raise UsageError(
                f"{what} was given a parameter's .grad of shape {tuple(value.shape)}, which would be counted once for "
                "each replica: what a step reads as .grad is the sum over all replicas already; use it as it is. Each "
                "replica's own gradients are what torch.autograd.grad(loss, parameters) returns"
            )


def sum_across(workers: Communicator, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elementwise sum of the local replicas' tensors and all other workers'. Every worker must call it."""
    total = sum_tensors(tensors)
    return workers.all_reduce(name, [total])[0] if not workers.is_single else total


def reduce_across(workers: Communicator, op: ReduceOp, values: Sequence[Any], axis: int | None = None) -> Any:
    """``reduction.reduce_values`` over the replicas of all workers. Every worker must call it.

    Args:
        workers: this worker's view of all.
        op: sum or mean.
        values: one per local replica, in replica order.
        axis: reduce along this dimension too; the mean is then the total sum over the total count.

    Raises:
        ConfigError: shapes that do not fit, or an axis that a value does not have.
        UsageError: the sum of gradients that are sums over all replicas already.
    """
    if op is ReduceOp.SUM:
        refuse_summed("reduce(sum)", values)
    if workers.is_single:
        return reduce_values(op, values, axis)
    name = f"reduce({op.value}{'' if axis is None else f', axis={axis}'})"
    if axis is None and all(isinstance(value, (int, float)) for value in values):
        return _reduce_numbers(workers, name, op, values)
    tensors = [as_tensor(value) for value in values]
    if axis is None:
        total = sum_across(workers, name, tensors)
        return total if op is ReduceOp.SUM else total / workers.num_replicas
    count = sum(length(tensor, axis) for tensor in tensors)
    total = sum_across(workers, name, [tensor.sum(dim=axis) for tensor in tensors])
    counts = workers.all_gather_numbers(f"{name} count", [count])
    return total if op is ReduceOp.SUM else total / sum(each for (each,) in counts)


def gather_across(workers: Communicator, name: str, values: Sequence[Any], axis: int) -> torch.Tensor:
    """The values of all replicas of all workers, in replica order, along ``axis``. Every worker must call it.

    Raises:
        ConfigError: a value without that dimension, or shapes that differ in another one.
    """
    local = gather_values(values, axis)
    return torch.cat(workers.all_gather(name, local, axis), dim=axis) if not workers.is_single else local


def _reduce_numbers(workers: Communicator, name: str, op: ReduceOp, values: Sequence[float]) -> float:
    whole = all(isinstance(value, int) for value in values)
    met = workers.all_gather_numbers(name, [sum(values), whole])
    total = sum(number for number, _ in met)
    if op is ReduceOp.MEAN:
        return total / workers.num_replicas
    return int(total) if all(flag for _, flag in met) else total


class Member(Protocol):
    """A replica taking part: its numbers, and ``meet``, which all local replicas must call with the same name."""

    @property
    def replica_id_in_sync_group(self) -> int: ...

    @property
    def local_replica(self) -> int: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def workers(self) -> Communicator: ...

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
    value, name = read_tensors(value), f"all_reduce({op.value})"
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
    gathered: torch.Tensor = _AllGather.apply(torch.as_tensor(read_tensors(value)), member, axis)  # type: ignore[no-untyped-call]
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
            met = member.workers.all_gather_numbers(f"{name} lengths", [sum(local)])
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
