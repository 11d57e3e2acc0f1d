"""Which weights would make the replicas' gradients, added up, the one replica's? Pure.

A mean over each shard makes every replica's gradient too large by one over its share of the batch: then the shares are
the weights that are missing. Candidates are tried from the simplest to the most general.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.verify.difference import Difference, largest
from lockstep.verify.record import UpdateRecord

WeightingKind = Literal["shares", "uniform", "weight penalty", "per replica"]


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """One candidate.

    Args:
        kind: the replicas' "shares" of the batch; one "uniform" factor; 1 each, less a multiple of the weights (a
            "weight penalty" that each replica adds); or one factor "per replica".
        factors: one for each replica.
        penalty: the multiple of the weights that is taken off.
        residuals: how far the weighted sum is from the one replica's gradients, by name.
    """

    kind: WeightingKind
    factors: tuple[float, ...]
    penalty: float = 0.0
    residuals: tuple[Difference, ...] = ()


def summed(update: UpdateRecord) -> dict[str, Tensor]:
    """The gradients as the optimizer gets them: added up over the replicas, divided once by the count; float64."""
    return _weighted(update, [1.0] * len(update.gradients))


def weightings(
    update: UpdateRecord, reference: Mapping[str, Tensor], shards: tuple[int, ...] | None, weights: Mapping[str, Tensor]
) -> tuple[Weighting, ...]:
    """The candidates with what each leaves unexplained.

    Args:
        update: of N replicas.
        reference: the one replica's gradients.
        shards: the rows of each replica; None if unknown.
        weights: the parameters before the update.
    """
    replicas = len(update.gradients)
    found = []
    if shards is not None and any(shards):
        found.append(_weighting("shares", update, reference, [rows / sum(shards) for rows in shards]))
    total = summed(update)
    (factor,) = _least_squares([total], reference)
    found.append(_weighting("uniform", update, reference, [factor] * replicas))
    rest = {name: gradient - reference[name] for name, gradient in total.items() if name in reference}
    (penalty,) = _least_squares([{name: weights[name] for name in rest if name in weights}], rest)
    found.append(_weighting("weight penalty", update, reference, [1.0] * replicas, penalty, weights))
    columns = [_weighted(update, [float(own == replica) for own in range(replicas)]) for replica in range(replicas)]
    found.append(_weighting("per replica", update, reference, _least_squares(columns, reference)))
    return tuple(found)


def _weighted(update: UpdateRecord, factors: Sequence[float]) -> dict[str, Tensor]:
    count = sum(update.counts) or 1.0
    result: dict[str, Tensor] = {}
    for factor, gradients in zip(factors, update.gradients, strict=True):
        for name, gradient in gradients.items():
            part = gradient.double() * (factor / count)
            result[name] = result[name] + part if name in result else part
    return result


def _least_squares(columns: Sequence[Mapping[str, Tensor]], target: Mapping[str, Tensor]) -> list[float]:
    """The factors of the columns whose sum is nearest to the target, over all parameters at once."""
    gram = torch.tensor([[_dot(a, b) for b in columns] for a in columns], dtype=torch.float64)
    right = torch.tensor([_dot(column, target) for column in columns], dtype=torch.float64)
    factors: list[float] = (torch.linalg.pinv(gram, hermitian=True) @ right).tolist()
    return factors


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float(a[name].double().flatten() @ b[name].double().flatten()) for name in a if name in b)


def _weighting(
    kind: WeightingKind,
    update: UpdateRecord,
    reference: Mapping[str, Tensor],
    factors: Sequence[float],
    penalty: float = 0.0,
    weights: Mapping[str, Tensor] | None = None,
) -> Weighting:
    weighted = _weighted(update, factors)
    residuals = []
    for name, expected in reference.items():
        found = weighted.get(name, torch.zeros_like(expected))
        if weights is not None and name in weights:
            found = found - penalty * weights[name].double()
        amount, size = largest(found - expected), largest(expected)
        residuals.append(Difference(step=update.step, kind="gradient", name=name, amount=amount, size=size))
    return Weighting(kind=kind, factors=tuple(factors), penalty=penalty, residuals=tuple(residuals))
