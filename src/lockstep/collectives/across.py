"""Reduce and gather over the replicas of all workers: locally first, then one call between the workers.

With one worker these are ``reduction``'s own results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.collectives.reduction import ReduceOp, as_tensor, gather_values, length, reduce_values, sum_tensors
from lockstep.collectives.summed import refuse_summed
from lockstep.collectives.workers import Workers


def sum_across(workers: Workers, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elementwise sum of the local replicas' tensors and all other workers'. Every worker must call it."""
    total = sum_tensors(tensors)
    return workers.sum_tensors(name, [total])[0] if not workers.alone else total


def reduce_across(workers: Workers, op: ReduceOp, values: Sequence[Any], axis: int | None = None) -> Any:
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
    if workers.alone:
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
    counts = workers.exchange(f"{name} count", [count])
    return total if op is ReduceOp.SUM else total / sum(each for (each,) in counts)


def gather_across(workers: Workers, name: str, values: Sequence[Any], axis: int) -> torch.Tensor:
    """The values of all replicas of all workers, in replica order, along ``axis``. Every worker must call it.

    Raises:
        ConfigError: a value without that dimension, or shapes that differ in another one.
    """
    local = gather_values(values, axis)
    return torch.cat(workers.gather_tensors(name, local, axis), dim=axis) if not workers.alone else local


def _reduce_numbers(workers: Workers, name: str, op: ReduceOp, values: Sequence[float]) -> float:
    whole = all(isinstance(value, int) for value in values)
    met = workers.exchange(name, [sum(values), whole])
    total = sum(number for number, _ in met)
    if op is ReduceOp.MEAN:
        return total / workers.num_replicas
    return int(total) if all(flag for _, flag in met) else total
