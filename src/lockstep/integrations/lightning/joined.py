"""What steps return for shards, joined to what one device returns for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.integrations.lightning.values import Part, combined


def joined(values: Sequence[Any], rows: Sequence[int], device: torch.device, what: str) -> Any:
    """Joins one value for each shard.

    Tensors [rows, ...] and lists of one item a row are put one after the other, in the order of the batch; numbers and
    tensors without dimensions are averaged over rows; dicts, lists and tuples are joined item by item.

    Args:
        values: one for each shard, in the order of the shards.
        rows: of each shard, at least one.
        device: where joined tensors are.
        what: names the value in errors.

    Raises:
        UsageError: it is not known what the batch's value is.
    """
    first = values[0]
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        return _joined_tensors(values, rows, device, what)
    if isinstance(first, Mapping) and all(
        isinstance(value, Mapping) and value.keys() == first.keys() for value in values
    ):
        items = {key: joined([value[key] for value in values], rows, device, f"{what}[{key!r}]") for key in first}
        return items if type(first) is dict else _like(first, items)
    if isinstance(first, (list, tuple)) and all(type(value) is type(first) for value in values):
        return _joined_sequences(values, rows, device, what)
    if len(values) == 1 or all(value is first or _same(value, first) for value in values):
        return first
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return combined("rows", [Part(value=value, rows=count) for value, count in zip(values, rows, strict=True)])
    raise UsageError(
        f"{what} is a {type(first).__name__} that differs between the replicas, and it is not known what one device "
        "has for the whole batch; expected tensors [rows, ...], lists of one item a row, or numbers"
    )


def _joined_tensors(values: Sequence[Tensor], rows: Sequence[int], device: torch.device, what: str) -> Tensor:
    detached = [value.detach().to(device) for value in values]
    first = detached[0]
    if len(values) == 1:
        return first
    if not first.ndim:
        parts = [Part(value=value, rows=count) for value, count in zip(detached, rows, strict=True)]
        return torch.as_tensor(combined("rows", parts, device))
    if all(value.ndim and len(value) == count for value, count in zip(detached, rows, strict=True)):
        return torch.cat(detached)
    if all(value.shape == first.shape and torch.equal(value, first) for value in detached):
        return first
    shapes = ", ".join(str(tuple(value.shape)) for value in values)
    raise UsageError(
        f"{what} has shapes {shapes} for shards of {', '.join(map(str, rows))} rows, so it is not known what one "
        "device has for the whole batch; return tensors [rows, ...] or tensors without dimensions"
    )


def _joined_sequences(values: Sequence[Any], rows: Sequence[int], device: torch.device, what: str) -> Any:
    kind, columns = type(values[0]), len({len(value) for value in values}) == 1
    by_row = all(len(value) == count for value, count in zip(values, rows, strict=True))
    if by_row and not (columns and any(_has_rows(item, rows[0]) for item in values[0])):
        return kind([item for value in values for item in value])
    if columns:
        items = [joined(column, rows, device, f"{what}[{at}]") for at, column in enumerate(zip(*values, strict=True))]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    lengths = ", ".join(str(len(value)) for value in values)
    raise UsageError(
        f"{what} has {lengths} items for shards of {', '.join(map(str, rows))} rows; expected one item a row, or the "
        "same number in all replicas"
    )


def _like(mapping: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(mapping)(items)
    except TypeError:  # a subclass of dict with arguments of its own
        return items


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows


def _same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    try:
        return bool(value == other)
    except (RuntimeError, ValueError, TypeError):  # arrays
        return False
