"""The arithmetic of reduce and gather on one value per replica: pure functions, always in replica order.

Adding in one fixed order is what makes the same program on the same layout bit-equal run after run.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.collectives.reads_as_tensor import as_read
from lockstep.errors import ConfigError


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
        return torch.as_tensor(as_read(value))
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
