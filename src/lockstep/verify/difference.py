"""How far two tensors are apart, and how far they may be. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Kind = Literal[
    "initial weight", "rows", "moved weight", "output", "loss", "gradient", "weight", "settled weight", "buffer"
]
KINDS: tuple[Kind, ...] = (
    "initial weight",
    "rows",
    "moved weight",
    "output",
    "loss",
    "gradient",
    "weight",
    "settled weight",
    "buffer",
)
"""In the order in which a step makes them: of one step, the first that differs is nearest to the cause."""

ROUNDING_UNITS = 64
"""Rounding errors, relative to a tensor's largest value, that the order of additions is granted everywhere."""
COARSE_UNITS = 4
"""Likewise, rounding errors of a half-precision type: values are rounded to it, while sums are made in float32."""
NOISE_FACTOR = 32
"""How much more than a measured rounding error, grown by the program itself, is granted."""

Key = tuple[int, Kind, str]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two runs are apart in one thing.

    Args:
        step: 1 for the first update, 0 for what was there before.
        kind: what it is.
        name: of the parameter, buffer, output or argument.
        amount: the largest difference of any value; infinite where the values cannot be compared.
        size: the largest value of the second run.
        note: what is to be said of it beside the amount.
    """

    step: int
    kind: Kind
    name: str
    amount: float
    size: float
    note: str = ""

    @property
    def key(self) -> Key:
        """By which it is found again in another comparison of the same program."""
        return self.step, self.kind, self.name

    @property
    def relative(self) -> float:
        """The amount over the size."""
        if self.amount == 0:
            return 0.0
        return self.amount / self.size if self.size > 0 else math.inf

    @property
    def order(self) -> tuple[int, int]:
        """Step, and kind within it."""
        return self.step, KINDS.index(self.kind)


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What counts as rounding.

    Args:
        unit: the relative rounding error of the parameters' type.
        coarse: that of the coarsest type that was computed in; 0 for no other.
        noise: the measured differences of two runs on one replica that differ by rounding alone.
    """

    unit: float
    coarse: float = 0.0
    noise: Mapping[Key, float] = field(default_factory=dict)

    @property
    def granted(self) -> float:
        """What every tensor is granted, relative to its size."""
        return max(ROUNDING_UNITS * self.unit, COARSE_UNITS * self.coarse)

    def allowed(self, difference: Difference) -> float:
        """The largest amount that rounding may explain."""
        if difference.kind == "rows":
            return 0.0
        measured = self.noise.get(difference.key, 0.0)
        return max(self.granted * difference.size, NOISE_FACTOR * measured)

    def explains(self, difference: Difference) -> bool:
        """Whether it is no more than rounding."""
        return difference.amount <= self.allowed(difference)


def tensor_difference(step: int, kind: Kind, name: str, ours: Tensor | None, reference: Tensor | None) -> Difference:
    """The difference of two tensors of one name; one that is missing counts as zeros."""
    if ours is None and reference is None:
        return Difference(step=step, kind=kind, name=name, amount=0.0, size=0.0)
    ours = torch.zeros_like(reference) if ours is None else ours  # type: ignore[arg-type]
    reference = torch.zeros_like(ours) if reference is None else reference
    if ours.shape != reference.shape:
        shapes = f"shape {tuple(ours.shape)} and {tuple(reference.shape)}"
        return Difference(step=step, kind=kind, name=name, amount=math.inf, size=largest(reference), note=shapes)
    amount = largest(ours.double() - reference.double())
    return Difference(
        step=step,
        kind=kind,
        name=name,
        amount=math.inf if math.isnan(amount) else amount,
        size=largest(reference),
    )


def largest(tensor: Tensor) -> float:
    """The largest absolute value; 0 of no values."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
