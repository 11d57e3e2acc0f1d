"""Whether the parts of a shard add up to it: a loss of some rows is the sum of what it gives for parts of them.

    measure(8 rows) = (total, count)   is   measure(first rows) + measure(next rows) + ...

Only the comparison is here. Whoever has a loss says how it is measured, and what follows from a mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from lockstep._torch_compat import tree_leaves
from lockstep.errors import CollectiveError
from lockstep.watch.row_dependence import bounds

FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError)
"""Errors of a loss or metric that cannot be computed from some of the rows."""


class Shard(Protocol):
    """The arguments of a loss for the rows of a shard, of which some can be taken."""

    @property
    def rows(self) -> int: ...
    @property
    def leaves(self) -> Sequence[Any]: ...
    def index(self) -> Tensor | None: ...
    def take(self, index: Tensor) -> Self: ...
    def requiring_grad(self) -> Self: ...
    def has_other_outputs(self) -> bool: ...
    def with_other_outputs_changed(self) -> Self: ...


class Totals(Protocol):
    """The loss of some rows as a total and a count."""

    @property
    def assumed_mean(self) -> bool: ...
    @property
    def rounding(self) -> float: ...
    def numbers(self) -> tuple[float, float]: ...


S = TypeVar("S", bound=Shard)
T = TypeVar("T", bound=Totals)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The parts of a shard do not add up to the shard."""

    is_sum: bool  # whether the loss of the whole is the sum of the losses of its parts

    def __str__(self) -> str:
        return "its parts do not add up to it"


def mismatch_of_parts(
    measure: Callable[[S], T],
    shard: S,
    whole: T,
    *,
    alone: Callable[[], AbstractContextManager[None]],
    parts: int = 2,
) -> Mismatch | str | None:
    """None if the parts of a shard add up to it; a text that says why, if that cannot be checked.

    Args:
        measure: the loss of some rows.
        shard: all rows.
        whole: their loss.
        alone: makes a block in which the replica computes as if there were no others.
        parts: how many there are at most.
    """
    why = ""
    for with_gradients in (False, True):  # a penalty on gradients needs them, and most losses are faster without
        rows = shard.requiring_grad() if with_gradients else shard
        try:
            with torch.set_grad_enabled(with_gradients), alone():
                return _compare(measure, rows, whole, parts)
        except CollectiveError:  # the loss knows of the other replicas
            return "it calls collectives" if whole.assumed_mean else None
        except FAILURES as error:
            first_line = str(error).strip().split("\n", 1)[0]
            why = f"on some of the rows alone it ends in {type(error).__name__}: {first_line}"
    return why


def _compare(measure: Callable[[S], T], shard: S, totals: T, most_parts: int) -> Mismatch | str | None:
    whole = totals.numbers()
    if not all(map(math.isfinite, whole)):
        return None
    index = shard.index()
    if index is None:
        return "no tensor of its arguments has a row for each example"
    if shard.rows == 1:  # the same row twice must give the same mean
        index = index.repeat(2)
        whole = measure(shard.take(index)).numbers()
    pieces = index.tensor_split(max(2, min(most_parts, shard.rows // 2)))
    parts = [measure(shard.take(piece)).numbers() for piece in pieces]
    difference, (suspect, _) = relative_difference(whole, parts), bounds(totals.rounding)
    if difference <= suspect:
        depends = totals.assumed_mean and shard.has_other_outputs() and _uses_others(measure, shard, whole, suspect)
        return "it takes from the outputs what the module has computed over its rows" if depends else None
    # A loss that draws numbers differs from itself, so its difference from the parts says nothing.
    if relative_difference(whole, [measure(shard.take(index)).numbers()]) > suspect:
        return "it gives another value for the same rows when it is called again"
    if shard.has_other_outputs():
        return "the outputs hold what has no row for each example"
    if difference <= bounds(max(totals.rounding, rounding_of(shard.leaves)))[1]:
        return f"its parts differ from the whole by {difference:.1g} of it, which may be rounding"
    means = sum(total / count for total, count in parts if count)
    return Mismatch(
        totals.assumed_mean and math.isclose(means, whole[0] / whole[1], rel_tol=bounds(totals.rounding)[1])
    )


def relative_difference(whole: Sequence[float], parts: Sequence[Sequence[float]]) -> float:
    """The relative difference of the summed parts from the whole; infinite if a part is not finite."""
    if not all(map(math.isfinite, chain.from_iterable(parts))):
        return math.inf
    differences: list[float] = [
        abs(sum(shares) - number) / max(sum(map(abs, shares)), abs(number), 1e-30)
        for number, shares in zip(whole, zip(*parts, strict=True), strict=True)
    ]
    return max(differences)


def _uses_others(measure: Callable[[S], T], shard: S, whole: tuple[float, float], suspect: float) -> bool:
    """Whether the loss depends on outputs that are not rows."""
    try:
        changed = measure(shard.with_other_outputs_changed()).numbers()
    except FAILURES:
        return True
    return relative_difference(whole, [changed]) > suspect


def rounding_of(values: Any) -> float:
    """The relative rounding of the least exact dtype, at least that of float32, which a loss may use inside."""
    dtypes = {leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    return max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
