"""Compares the records of two runs: what belongs together, in the order in which a step makes it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from lockstep.verify.trace import BatchRecord, EndRecord, Leaf, OutputRecord, Rows, StartRecord, UpdateRecord

Verdict = Literal["same", "undistributed", "scaled", "reordered", "different", "count"]


@dataclass(frozen=True, kw_only=True)
class BatchComparison:
    """What became of a step's global batch on N replicas.

    Args:
        verdict: "same" rows in the same order; "undistributed": every replica got all of it; "scaled": as many times
            the rows as there are replicas; "reordered": the same rows in another order; "different" rows; another
            "count" of batches.
        name: of the first argument that is not the same.
        rows: the fingerprints of the batch on N replicas, all together.
        reference_rows: of the batch on one.
        batches: how many there were for this update, on N replicas and on one.
    """

    verdict: Verdict
    name: str = ""
    rows: Rows = ()
    reference_rows: Rows = ()
    batches: tuple[int, int] = (1, 1)

    @property
    def common(self) -> int:
        """How many rows are in both."""
        return sum((Counter(self.rows) & Counter(self.reference_rows)).values())


SAME = BatchComparison(verdict="same")


def compare_batches(ours: Sequence[BatchRecord], reference: Sequence[BatchRecord]) -> BatchComparison:
    """Compares the batches of one update, those on N replicas with those on one."""
    if len(ours) != len(reference):
        return BatchComparison(verdict="count", name="batches", batches=(len(ours), len(reference)))
    found = [_compare_batch(mine, other) for mine, other in zip(ours, reference, strict=True)]
    return next((each for each in found if each.verdict != "same"), found[0] if found else SAME)


def shard_sizes(batches: Sequence[BatchRecord]) -> tuple[int, ...] | None:
    """The rows that each replica got for an update; None where nothing with rows was seen."""
    sizes = [
        tuple(len(rows) for rows in tensor.replicas)
        for batch in batches
        for tensor in _divided(batch.leaves)[:1] or batch.inputs[:1]
    ]
    return tuple(sum(column) for column in zip(*sizes, strict=True)) if sizes else None


def _divided(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The tensors of which every replica has its own part; others, such as class weights, all replicas have whole."""
    return [leaf for leaf in leaves if len(leaf.replicas) == 1 or len(set(leaf.replicas)) > 1]


def _compare_batch(ours: BatchRecord, reference: BatchRecord) -> BatchComparison:
    compared = [_compare_leaf(mine, other) for mine, other in zip(ours.leaves, reference.leaves, strict=False)]
    if len(ours.leaves) == len(reference.leaves) and any(each.verdict == "same" for each in compared):
        # Beside a tensor that is divided, one that all replicas have whole is a constant of the step.
        same = next(each for each in compared if each.verdict == "same")
        return next((each for each in compared if each.verdict not in ("same", "undistributed")), same)
    inputs = [_compare_leaf(mine, other) for mine, other in zip(ours.inputs, reference.inputs, strict=False)]
    if all(each.verdict == "undistributed" for each in compared) and inputs:
        return next((each for each in inputs if each.verdict != "same"), SAME)  # the batch came as a closure, perhaps
    return next((each for each in [*compared, *inputs] if each.verdict != "same"), SAME)


def _compare_leaf(ours: Leaf, reference: Leaf) -> BatchComparison:
    mine: Rows = tuple(chain.from_iterable(ours.replicas))
    other: Rows = tuple(chain.from_iterable(reference.replicas))

    def result(verdict: Verdict) -> BatchComparison:
        return BatchComparison(verdict=verdict, name=ours.name, rows=mine, reference_rows=other)

    replicas = len(ours.replicas)
    if mine == other:
        return result("same")
    if replicas > 1 and all(rows == other for rows in ours.replicas):
        return result("undistributed")
    if replicas > 1 and len(mine) == replicas * len(other):
        return result("scaled")
    if Counter(mine) == Counter(other):
        return result("reordered")
    return result("different")


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


@dataclass(frozen=True, kw_only=True)
class Before:
    """Parameters by name, of both runs."""

    ours: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]

    def then(self, ours: UpdateRecord, reference: UpdateRecord) -> Before:
        """What they are after an update and what followed it."""
        return Before(
            ours={**self.ours, **ours.parameters, **ours.settled},
            reference={**self.reference, **reference.parameters, **reference.settled},
        )


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """One update of both runs.

    Args:
        step: 1 for the first.
        batch: whether the rows are the same.
        differences: of everything, in the order in which a step makes it, what is equal too.
        weightings: what explains a difference of the gradients, if there is one beyond rounding.
        stride: how much further the weights went than on one replica; None if not all by one factor.
        changed: parameters that changed outside the optimizer, in either run.
        losses: what each replica back-propagated in the first run.
    """

    step: int
    batch: BatchComparison = SAME
    differences: tuple[Difference, ...] = ()
    weightings: tuple[Weighting, ...] = ()
    stride: float | None = None
    changed: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs.

    Args:
        start: of the first run.
        reference: of the second run, the one that is taken to be right.
        initial: differences of the parameters before the first step.
        steps: the updates that both made.
        ends: how both ended.
        extra: updates that the first made and the second did not; negative the other way round.
        draws: whether random numbers were drawn in a replica's step.
    """

    start: StartRecord
    reference: StartRecord
    initial: tuple[Difference, ...] = ()
    steps: tuple[StepComparison, ...] = ()
    ends: tuple[EndRecord, EndRecord] = field(default=(EndRecord(), EndRecord()))
    extra: int = 0
    draws: bool = False

    @property
    def unit(self) -> float:
        """The relative rounding error of the parameters' type."""
        return max(end.unit for end in self.ends)

    @property
    def coarse(self) -> float:
        """That of the coarsest type that was computed in, in either run."""
        return max(end.coarse for end in self.ends)

    @property
    def differences(self) -> Iterator[Difference]:
        """All of them, in order."""
        yield from self.initial
        for step in self.steps:
            yield from step.differences

    def first(self, allowance: Allowance) -> Difference | None:
        """The first that rounding does not explain; of one kind and step, the largest relative to its size."""
        beyond = [difference for difference in self.differences if not allowance.explains(difference)]
        if not beyond:
            return None
        earliest = min(difference.order for difference in beyond)
        return max((each for each in beyond if each.order == earliest), key=lambda each: each.relative)

    def step(self, number: int) -> StepComparison:
        """The comparison of update ``number``, from 1."""
        return next(step for step in self.steps if step.step == number)


def compare_starts(ours: StartRecord, reference: StartRecord) -> tuple[Difference, ...]:
    """The parameters before the first step."""
    return tuple(_by_name(0, "initial weight", ours.parameters, reference.parameters))


def compare_updates(ours: UpdateRecord, reference: UpdateRecord, before: Before, unit: float) -> StepComparison:
    """One update of both runs.

    Args:
        ours: on N replicas.
        reference: on one.
        before: the parameters of both before this update.
        unit: the relative rounding error of the parameters' type, which says when a difference is worth explaining.
    """
    step = ours.step
    batch = compare_batches(ours.batches, reference.batches)
    mine, other = summed(ours), summed(reference)
    gradients = tuple(_by_name(step, "gradient", mine, other))
    parameters = tuple(_by_name(step, "weight", ours.parameters, reference.parameters))
    rounding = Allowance(unit=unit)
    worth = any(not rounding.explains(each) for each in gradients)
    differences = (
        _rows_difference(step, batch),
        *_changed(step, "moved weight", before, Before(ours=ours.moved, reference=reference.moved)),
        *(_compare_outputs(step, ours, reference) if batch.verdict == "same" else ()),
        _loss_difference(ours, reference),
        *gradients,
        *parameters,
        *_changed(
            step,
            "settled weight",
            Before(ours=ours.parameters, reference=reference.parameters),
            Before(ours=ours.settled, reference=reference.settled),
        ),
        *_by_name(step, "buffer", ours.buffers, reference.buffers),
    )
    return StepComparison(
        step=step,
        batch=batch,
        differences=differences,
        weightings=weightings(ours, other, shard_sizes(ours.batches), before.reference) if worth else (),
        stride=_stride(ours.parameters, reference.parameters, before),
        changed=tuple({**ours.moved, **ours.settled, **reference.moved, **reference.settled}),
        losses=ours.losses,
    )


def _by_name(
    step: int, kind: Kind, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> Iterator[Difference]:
    for name in {**reference, **ours}:
        yield tensor_difference(step, kind, name, ours.get(name), reference.get(name))


def _changed(step: int, kind: Kind, before: Before, now: Before) -> Iterator[Difference]:
    """The parameters that changed in either run; one that did not in the other is there what it was."""
    for name in {**now.reference, **now.ours}:
        ours = now.ours.get(name, before.ours.get(name))
        yield tensor_difference(step, kind, name, ours, now.reference.get(name, before.reference.get(name)))


def _rows_difference(step: int, batch: BatchComparison) -> Difference:
    # The same rows in another order give the same sums.
    same = batch.verdict in ("same", "reordered")
    amount = 0.0 if same else float(max(1, len(batch.rows) - batch.common))
    return Difference(step=step, kind="rows", name=batch.name, amount=amount, size=float(len(batch.reference_rows)))


def _compare_outputs(step: int, ours: UpdateRecord, reference: UpdateRecord) -> Iterator[Difference]:
    """Row by row, where the replicas' rows one after another are as many as on one replica."""
    for mine, other in zip(ours.outputs, reference.outputs, strict=False):
        whole, single = _joined(mine), _joined(other)
        if mine.name == other.name and whole is not None and single is not None and whole.shape == single.shape:
            yield tensor_difference(step, "output", mine.name, whole, single)


def _joined(output: OutputRecord) -> Tensor | None:
    parts = [part for part in output.replicas if part is not None]
    widths = {part.shape[1] for part in parts if len(part)}
    return torch.cat([part for part in parts if len(part)]) if len(widths) == 1 else None


def _loss_difference(ours: UpdateRecord, reference: UpdateRecord) -> Difference:
    mine, other = _loss(ours), _loss(reference)
    amount = abs(mine - other)
    return Difference(
        step=ours.step,
        kind="loss",
        name="total",
        amount=math.inf if math.isnan(amount) else amount,
        size=abs(other),
        note=f"{mine:.6g} and {other:.6g}",
    )


def _loss(update: UpdateRecord) -> float:
    if any(update.totals):
        return sum(update.totals) / sum(update.counts)
    return sum(update.losses)


def _stride(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], before: Before) -> float | None:
    """The one factor between both runs' changes of all weights, to 1 %."""
    names = [name for name in reference if name in ours and name in before.ours and name in before.reference]
    mine = [(ours[name].double() - before.ours[name].double()).flatten() for name in names]
    other = [(reference[name].double() - before.reference[name].double()).flatten() for name in names]
    square = sum(float(each @ each) for each in other)
    if not square:
        return None
    factor = sum(float(a @ b) for a, b in zip(mine, other, strict=True)) / square
    left = sum(float((a - factor * b).square().sum()) for a, b in zip(mine, other, strict=True))
    return factor if left <= 1e-4 * factor**2 * square else None
