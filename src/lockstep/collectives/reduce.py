"""Reductions and gathers between replicas: the threads of this process first, then all workers.

``all_reduce`` and ``all_gather`` are differentiable. The gradient of a sum over replicas is the sum of all replicas'
gradients, as in TensorFlow, so the backward pass of a collective is a collective too, and every replica must run it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from lockstep.checks import shown
from lockstep.collectives.communicator import Communicator
from lockstep.collectives.per_replica import read_tensors
from lockstep.collectives.sum_order import sums_within, tree_sum
from lockstep.errors import ConfigError, UsageError


class ReduceOp(enum.Enum):
    """How values of several replicas become one."""

    SUM = "sum"
    MEAN = "mean"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The operation named ``op``, "sum" or "mean" in any case."""
        if isinstance(op, cls):
            return op
        try:
            return cls(op.lower() if isinstance(op, str) else op)
        except ValueError:
            choices = ", ".join(repr(member.value) for member in cls)
            raise ConfigError(f"unknown reduction {op!r}; choose one of {choices} or a ReduceOp") from None


def reduce_across(workers: Communicator, op: ReduceOp, values: Sequence[Any], axis: int | None = None) -> Any:
    """Reduces one value per replica, of all workers, to one value. Every worker must call it.

    Args:
        workers: this worker's communicator.
        op: sum or mean.
        values: tensors, numbers or lists of numbers, one per local replica; of one shape, except in dimension ``axis``.
        axis: None adds the values elementwise. A dimension adds within each value along it first; the mean is then
            the total sum over the total count, so that uneven shards come out right.

    Returns:
        A number if all values are numbers and ``axis`` is None, else a tensor on the first value's device.
    """
    if op is ReduceOp.SUM:
        refuse_summed("reduce(sum)", values)
    name = f"reduce({op.value}{'' if axis is None else f', axis={axis}'})"
    if axis is None and all(isinstance(value, (int, float)) for value in values):
        # Python's sums of ints are ints. Records carry doubles, so the kinds are counted beside the values.
        total, floats = workers.sum_numbers(name, [(value, not isinstance(value, int)) for value in values])
        if op is ReduceOp.MEAN:
            return total / workers.num_replicas
        return total if floats else int(total)
    tensors = [_as_tensor(value) for value in values]
    if axis is None:
        summed = sum_across(workers, name, tensors)
        return summed if op is ReduceOp.SUM else summed / workers.num_replicas
    lengths = [[_length(tensor, axis)] for tensor in tensors]
    summed = sum_across(workers, name, [tensor.sum(dim=axis) for tensor in tensors])
    (count,) = workers.sum_numbers(f"{name} count", lengths)
    return summed if op is ReduceOp.SUM else summed / count


def gather_across(workers: Communicator, name: str, values: Sequence[Any], axis: int) -> torch.Tensor:
    """Concatenates the values of all replicas of all workers, in replica order. Every worker must call it."""
    tensors = [_as_tensor(value) for value in values]
    for tensor in tensors:
        _length(tensor, axis)
    if len({_without(tensor.shape, axis) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(f"cannot gather shapes {shapes} along axis {axis}; they may differ in that dimension only")
    local = torch.cat([tensor.to(tensors[0].device) for tensor in tensors], dim=axis)
    return local if workers.is_single else torch.cat(workers.all_gather(name, local, axis), dim=axis)


def sum_across(workers: Communicator, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elementwise sum of the local replicas' tensors and all other workers'. Every worker must call it."""
    return sums_across(workers, name, [tensors])[0]


def sums_across(workers: Communicator, name: str, values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """``sum_across`` of several values, in one call."""
    if workers.is_single:
        return list(map(sum_tensors, values))
    first, replicas = workers.first_replica, workers.num_replicas
    parts = [[part for _, part in sums_within(_addends(tensors), first, replicas, _plus)] for tensors in values]
    return workers.all_reduce(name, list(zip(*parts, strict=True)))


def sum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elementwise sum, on the first tensor's device, in the order of ``sum_order``. Booleans are counted."""
    total = tree_sum(_addends(tensors), _plus)
    # The sum over one replica is its tensor, and a caller may write to a sum (tests/collectives/test_reduce.py).
    return total.clone() if total is tensors[0] else total


def _addends(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"cannot add values of shapes {shapes}, one per replica; give all replicas the same shape, "
            "or name the axis whose length differs"
        )
    # torch's True + True is True.
    return [tensor.long() if tensor.dtype == torch.bool else tensor for tensor in tensors]


def _plus(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other.to(one.device)


def _as_tensor(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(read_tensors(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot reduce a {type(value).__name__}; give tensors or numbers ({error})") from error


def _length(tensor: torch.Tensor, axis: int) -> int:
    if type(axis) is not int:
        raise ConfigError(f"axis={shown(axis)} was given, expected a whole number: the dimension")
    if not -tensor.ndim <= axis < tensor.ndim:
        choice = f"choose 0 to {tensor.ndim - 1}" if tensor.ndim else "give values of at least one dimension"
        raise ConfigError(f"axis {axis} does not exist in a value of shape {tuple(tensor.shape)}; {choice}")
    return tensor.shape[axis]


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    axis %= len(shape)
    return (*shape[:axis], *shape[axis + 1 :])


_MARK = "_lockstep_summed"


def mark_summed(gradient: torch.Tensor) -> None:
    """Marks ``gradient`` as the sum over all replicas."""
    setattr(gradient, _MARK, True)


def refuse_summed(what: str, values: Iterable[Any]) -> None:
    """Raises a UsageError if a value that ``what`` is about to add up over the replicas is such a sum already."""
    for value in values:
        if isinstance(value, torch.Tensor) and getattr(value, _MARK, False):
            raise UsageError(
                f"{what} was given a parameter's .grad of shape {tuple(value.shape)}, which is the sum over all "
                "replicas already; use it as it is, or a replica's own from torch.autograd.grad(loss, parameters)"
            )


class Replica(Protocol):
    """What a collective uses of a replica; ``replicas.context.ReplicaContext`` describes it."""

    @property
    def local_replica(self) -> int: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def workers(self) -> Communicator: ...
    def meet(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any: ...


def all_reduce(replica: Replica, op: ReduceOp, value: Any) -> Any:
    """Sums or averages ``value`` over all replicas; each gets its own copy. Every replica must call it."""
    value, name = read_tensors(value), f"all_reduce({op.value})"
    if op is ReduceOp.SUM:
        refuse_summed(name, [value])
    if not isinstance(value, torch.Tensor):
        return replica.meet(name, value, partial(reduce_across, replica.workers, op))
    total = _AllReduceSum.apply(value, replica, name)  # type: ignore[no-untyped-call]
    return total if op is ReduceOp.SUM else total / replica.num_replicas_in_sync


def all_gather(replica: Replica, value: Any, axis: int) -> torch.Tensor:
    """Concatenates ``value`` of all replicas along ``axis``; lengths may differ there. Every replica must call it."""
    tensor = _as_tensor(value)
    # Whether the result needs a gradient is known when all have met, and torch asks for it here: this input says yes.
    differentiable = torch.is_grad_enabled() and (tensor.is_floating_point() or tensor.is_complex())
    mark = tensor.new_empty(0, requires_grad=True) if differentiable else None
    gathered: torch.Tensor = _AllGather.apply(tensor, mark, replica, axis)  # type: ignore[no-untyped-call]
    return gathered


def _sum_of_all(replica: Replica, name: str, value: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = replica.meet(name, value, partial(sum_across, replica.workers, name))
    return total


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, replica: Replica, name: str) -> torch.Tensor:
        ctx.replica, ctx.name = replica, name
        return _own_copy(_sum_of_all(replica, name, value), value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = _sum_of_all(ctx.replica, f"{ctx.name} backward", gradients[0])
        return _own_copy(total, gradients[0]), None, None


class _AllGather(torch.autograd.Function):
    """The rows of all replicas. The gradient of a replica's rows is the sum of what all replicas computed with them.

    All results need a gradient if one replica's value does. A replica without rows may not have run its module, and
    others would wait for it in their backward passes (test_gather_rows: test_a_replica_without_rows_leaves_out_...).
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mark: torch.Tensor | None, replica: Replica, axis: int) -> torch.Tensor:
        ctx.replica, ctx.axis, ctx.name = replica, axis, f"all_gather(axis={axis})"
        workers, needs_gradient = replica.workers, mark is not None and ctx.needs_input_grad[0]

        def combine(values: list[tuple[torch.Tensor, bool]]) -> tuple[torch.Tensor, list[int], bool]:
            # The backward pass cuts each replica's part from a sum over all, so it must know where the part begins
            # among those of all workers.
            tensors = [tensor for tensor, _ in values]
            gathered = gather_across(workers, ctx.name, tensors, axis)
            local = [tensor.shape[axis] for tensor in tensors]
            numbers = [sum(local), int(any(needs for _, needs in values))]
            of_workers = workers.all_gather_numbers(f"{ctx.name} lengths", numbers)
            first = int(sum(rows for rows, _ in of_workers[: workers.index]))
            begins = [first + sum(local[:number]) for number in range(len(local))]
            return gathered, begins, any(needs for _, needs in of_workers)

        gathered, begins, any_needs_gradient = replica.meet(ctx.name, (value, needs_gradient), combine)
        ctx.begin, ctx.length = begins[replica.local_replica], value.shape[axis]
        result = _own_copy(gathered, value)
        if not any_needs_gradient:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = _sum_of_all(ctx.replica, f"{ctx.name} backward", gradients[0])
        part = _own_copy(total.narrow(ctx.axis, ctx.begin, ctx.length), gradients[0])
        return part if ctx.needs_input_grad[0] else None, None, None, None


def _own_copy(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A replica's own copy, on its device, of a result that is one object for all replicas."""
    return result.to(like.device, copy=True)
