"""A number of the whole batch from the numbers of its shards: a loss, a logged value, a count that the module keeps.

    rule        the number of the batch                        for
    count       sum of value x count / sum of counts           a mean whose count was traced: labels that count, a mask
    rows        sum of value x rows / sum of rows              a mean over rows
    batch_size  the same with the ``batch_size`` of self.log   a mean over something else
    sum, max, min                                              counts, extremes
    same                                                       the value of a metric, which is of all shards already

Nobody says which rule a number follows. So it is tried: the number of some rows must be what the rule makes of the
numbers of their halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.watch.loss_parts import relative_difference

EXACT, ROUGH = 1e-4, 5e-2
"""Relative differences that are no rounding: in float32 or better, and in float16 or bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The number of one shard.

    Attributes:
        value: a number, or a tensor without dimensions.
        rows: the rows of the shard, at least one.
        count: what the value is a mean over, if that was traced.
        batch_size: what ``self.log`` was told.
    """

    value: Tensor | float
    rows: int
    count: float | None = None
    batch_size: float | None = None

    @property
    def number(self) -> float:
        return float(self.value.detach()) if isinstance(self.value, Tensor) else float(self.value)


def _rows(part: Part) -> float | None:
    return float(part.rows)


def _count(part: Part) -> float | None:
    return part.count


def _batch_size(part: Part) -> float | None:
    return part.batch_size


_MEANS: Mapping[str, Callable[[Part], float | None]] = {"count": _count, "rows": _rows, "batch_size": _batch_size}
_EXTREMES: Mapping[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min}
FIRST_RULES = {"mean": "rows", "sum": "sum", "max": "max", "min": "min"}
"""By the ``reduce_fx`` of self.log: the rule that is assumed of a value, as long as nothing is known."""
SAME = "same"
_RULES = ("count", "rows", "batch_size", "sum", "max", "min")


def weights_of(rule: str, parts: Sequence[Part]) -> list[float]:
    """The factors by which the parts are added up, if the rule adds them up."""
    if rule == "sum":
        return [1.0] * len(parts)
    counts = [_MEANS.get(rule, _rows)(part) for part in parts]
    if any(count is None for count in counts):
        counts = [float(part.rows) for part in parts]
    total = math.fsum(count for count in counts if count is not None)
    # A mean over nothing is NaN, in one shard and in the batch; a shard without any counts as nothing in the batch.
    return [0.0 if not count else count / total for count in counts] if total else [1.0 / len(parts)] * len(parts)


def combined(rule: str, parts: Sequence[Part], device: torch.device | None = None) -> Tensor | float:
    """The number of the batch; a tensor on ``device`` if the parts are tensors, without gradients."""
    numbers = [part.number for part in parts]
    same = all(number == numbers[0] for number in numbers)
    if rule in _EXTREMES:
        result = _EXTREMES[rule](numbers)
    elif same and rule != "sum":
        result = numbers[0]  # adding up shares would round it
    else:
        weights = weights_of(rule, parts)
        result = math.fsum(weight * number for weight, number in zip(weights, numbers, strict=True) if weight)
    first = parts[0].value
    if not isinstance(first, Tensor):
        is_count = all(isinstance(part.value, int) for part in parts) and float(result).is_integer()
        return int(result) if is_count else result
    dtype = first.dtype if first.is_floating_point() or float(result).is_integer() else torch.get_default_dtype()
    return torch.tensor(result, dtype=dtype, device=device)


def candidates(parts: Sequence[Part], assumed: str, *, adds_up: bool = False) -> list[str]:
    """The rules that a number may follow, the likeliest first; with ``adds_up`` only means and sums.

    The gradient of a maximum is that of one row, and not a weighted sum of the replicas' gradients.
    """
    if all(math.isnan(part.number) for part in parts):
        return [SAME]  # in a comparison, metrics have no value
    counted = all(part.count is not None for part in parts)
    sized = all(part.batch_size is not None for part in parts)
    first = ["count"] if counted and assumed == "rows" else []
    rest = [rule for rule in _RULES if (rule != "count" or counted) and (rule != "batch_size" or sized)]
    rest = [rule for rule in rest if not adds_up or rule not in _EXTREMES]
    return list(dict.fromkeys([*first, assumed, *rest]))


def fits(rule: str, whole: Part, halves: Sequence[Part], *, tolerance: float) -> bool:
    """Whether the rule makes the number of all rows of those of their halves."""
    number, expected = float(combined(rule, halves)), whole.number
    if not math.isfinite(number) or not math.isfinite(expected):
        return repr(number) == repr(expected)
    return relative_difference([expected], [[number]]) <= tolerance


def tolerance_of(values: Any) -> float:
    """What may be rounding, given tensors that a number was computed with."""
    low = any(isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) for value in values)
    return ROUGH if low or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else EXACT
