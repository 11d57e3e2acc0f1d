"""Compares the records of two runs, in the order in which a step computes things. Pure functions.

The first difference beyond rounding is the nearest to the cause. Where gradients differ, ``fit_gradients`` tries which
factors of the replicas' gradients would give those of the single replica.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, get_args

import torch
from torch import Tensor

from lockstep_tools.verify.trace import BatchRecord, BatchTensors, EndRecord, Rows, StartRecord, StepTrace, UpdateRecord

# Batches.

Verdict = Literal["same", "undistributed", "scaled", "reordered", "different", "count"]


@dataclass(frozen=True, kw_only=True)
class BatchComparison:
    """The global batch of one update, on N replicas and on one. N replicas' rows are taken one after another."""

    # "same": the same rows in the same order. "undistributed": every replica got the whole batch. "scaled": N times as
    # many rows. "reordered": the same rows in another order. "different": other rows. "count": another number of
    # batches.
    verdict: Verdict
    name: str = ""  # the first tensor that is not the same
    rows: Rows = ()  # fingerprints of the rows on N replicas
    reference_rows: Rows = ()  # fingerprints of the rows on one
    batches: tuple[int, int] = (1, 1)  # number of batches on N replicas and on one

    @property
    def common(self) -> int:
        return sum((Counter(self.rows) & Counter(self.reference_rows)).values())


SAME_BATCH = BatchComparison(verdict="same")


def compare_batches(candidate: Sequence[BatchRecord], reference: Sequence[BatchRecord]) -> BatchComparison:
    """Compares the batches of one update on N replicas with those on one."""
    if len(candidate) != len(reference):
        return BatchComparison(verdict="count", name="batches", batches=(len(candidate), len(reference)))
    comparisons = [
        _compare_batch(batch, reference_batch) for batch, reference_batch in zip(candidate, reference, strict=True)
    ]
    return _first_not_same(comparisons) or (comparisons[0] if comparisons else SAME_BATCH)


def shard_sizes(batches: Sequence[BatchRecord]) -> tuple[int, ...] | None:
    """The number of rows that each replica got for an update; None if no tensor with rows was seen."""
    sizes = []
    for batch in batches:
        # A tensor that all replicas have whole, such as class weights, says nothing about shards.
        divided = [rows for rows in batch.arguments.values() if len(rows) == 1 or len(set(rows)) > 1]
        sizes += [tuple(map(len, rows)) for rows in [*divided, *batch.inputs.values()][:1]]
    return tuple(sum(column) for column in zip(*sizes, strict=True)) if sizes else None


def _compare_batch(candidate: BatchRecord, reference: BatchRecord) -> BatchComparison:
    arguments = _compare_tensors(candidate.arguments, reference.arguments)
    same = next((comparison for comparison in arguments if comparison.verdict == "same"), None)
    if same is not None and len(candidate.arguments) == len(reference.arguments):
        # Beside a tensor that is divided, one that all replicas have whole is a constant of the step.
        return next((other for other in arguments if other.verdict not in ("same", "undistributed")), same)
    inputs = _compare_tensors(candidate.inputs, reference.inputs)
    if inputs and all(comparison.verdict == "undistributed" for comparison in arguments):
        # The batch may have come as a closure, so that no argument of ``run`` has rows.
        return _first_not_same(inputs) or SAME_BATCH
    return _first_not_same([*arguments, *inputs]) or SAME_BATCH


def _first_not_same(comparisons: Sequence[BatchComparison]) -> BatchComparison | None:
    return next((comparison for comparison in comparisons if comparison.verdict != "same"), None)


def _compare_tensors(candidate: BatchTensors, reference: BatchTensors) -> list[BatchComparison]:
    return [
        _compare_rows(key[-1], rows, reference_rows)
        for (key, rows), reference_rows in zip(candidate.items(), reference.values(), strict=False)
    ]


def _compare_rows(name: str, candidate: tuple[Rows, ...], reference: tuple[Rows, ...]) -> BatchComparison:
    rows: Rows = tuple(chain.from_iterable(candidate))
    reference_rows: Rows = tuple(chain.from_iterable(reference))
    verdict: Verdict = "different"
    if rows == reference_rows:
        verdict = "same"
    elif len(candidate) > 1 and all(replica_rows == reference_rows for replica_rows in candidate):
        verdict = "undistributed"
    # A program that makes its batch size of the number of replicas; its rows cannot be compared one by one.
    elif len(candidate) > 1 and len(rows) == len(candidate) * len(reference_rows):
        verdict = "scaled"
    elif Counter(rows) == Counter(reference_rows):
        verdict = "reordered"
    return BatchComparison(verdict=verdict, name=name, rows=rows, reference_rows=reference_rows)


# Tensors.

Kind = Literal[
    "initial weight",
    "rows",
    "weight changed before update",
    "output",
    "loss",
    "gradient",
    "weight",
    "weight changed after update",
    "buffer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which a step computes them."""

# Sums of N shards are added in another order than those of the whole batch, and each addition rounds. NOISE_FACTOR is
# for programs that make rounding grow, such as a ReLU at zero: there a run with weights moved by one rounding error
# says how far.
ROUNDING_UNITS = 64
"""Tolerance of every tensor, in rounding errors of its largest value, since sums are added in another order."""
COARSE_UNITS = 4
"""Tolerance in rounding errors of a half-precision dtype: values are rounded to it, but sums are made in float32."""
NOISE_FACTOR = 32
"""Tolerance relative to a measured rounding error, which has grown through the program itself."""

DifferenceKey = tuple[int, Kind, str]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one tensor between two runs."""

    step: int  # number of the update, from 1; 0 before the first
    kind: Kind  # what the tensor is
    name: str  # name of the parameter, buffer, output or argument
    amount: float  # largest absolute difference of any value; infinite if the values cannot be compared
    size: float  # largest absolute value in the second run
    note: str = ""  # what the report adds to the amount

    @property
    def key(self) -> DifferenceKey:
        """Identifies the tensor in another comparison of the same program."""
        return self.step, self.kind, self.name

    @property
    def relative(self) -> float:
        if self.amount == 0:
            return 0.0
        return self.amount / self.size if self.size > 0 else math.inf

    @property
    def order(self) -> tuple[int, int]:
        """Orders differences by step, and by kind within a step."""
        return self.step, KINDS.index(self.kind)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How large a difference may be and still count as rounding."""

    unit: float  # machine epsilon of the parameters' dtype
    coarse: float = 0.0  # machine epsilon of the coarsest dtype in use; 0 if there is no other
    # measured differences between two runs on one replica that differ by rounding only
    noise: Mapping[DifferenceKey, float] = field(default_factory=dict)

    @property
    def relative(self) -> float:
        """The tolerance of every tensor, relative to its size."""
        return max(ROUNDING_UNITS * self.unit, COARSE_UNITS * self.coarse)

    def of(self, difference: Difference) -> float:
        """The largest amount that rounding may explain."""
        if difference.kind == "rows":
            return 0.0
        return max(self.relative * difference.size, NOISE_FACTOR * self.noise.get(difference.key, 0.0))

    def covers(self, difference: Difference) -> bool:
        return difference.amount <= self.of(difference)


def tensor_difference(
    step: int, kind: Kind, name: str, candidate: Tensor | None, reference: Tensor | None
) -> Difference:
    """The difference of two tensors with the same name; a missing one counts as zeros."""
    if candidate is None and reference is None:
        return Difference(step=step, kind=kind, name=name, amount=0.0, size=0.0)
    # A parameter that got no gradient on one side is as one with a gradient of zeros: the update is the same.
    candidate = torch.zeros_like(reference) if candidate is None else candidate  # type: ignore[arg-type]
    reference = torch.zeros_like(candidate) if reference is None else reference
    amount, note = math.inf, ""
    if candidate.shape == reference.shape:
        amount = _largest(candidate.double() - reference.double())
    else:
        note = f"shape {tuple(candidate.shape)} and {tuple(reference.shape)}"
    # NaN compares as equal to nothing and smaller than nothing, and would pass every tolerance.
    amount = math.inf if math.isnan(amount) else amount
    return Difference(step=step, kind=kind, name=name, amount=amount, size=_largest(reference), note=note)


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


# Gradients.

FitKind = Literal["shares", "uniform", "weight penalty", "per replica"]


@dataclass(frozen=True, kw_only=True)
class GradientFit:
    """Factors for the replicas' gradients, and how close their weighted sum comes to the single replica's gradients."""

    # "shares": each replica's share of the batch, as after a mean over each shard. "uniform": one factor. "weight
    # penalty": 1 each, minus a multiple of the weights. "per replica": one factor each.
    kind: FitKind
    factors: tuple[float, ...]  # one per replica
    penalty: float = 0.0  # the multiple of the weights that is subtracted
    residuals: tuple[Difference, ...] = ()  # what is left of each gradient


def summed_gradients(update: UpdateRecord) -> dict[str, Tensor]:
    """The gradients as the optimizer gets them: summed over the replicas, divided once by the count; float64."""
    return _weighted_sum(update, [1.0] * len(update.replicas))


def fit_gradients(
    update: UpdateRecord, reference: Mapping[str, Tensor], shards: tuple[int, ...] | None, weights: Mapping[str, Tensor]
) -> tuple[GradientFit, ...]:
    """All fits, from the simplest to the most general.

    ``reference``: the single replica's gradients. ``shards``: number of rows of each replica, None if unknown.
    ``weights``: the parameters before the update.
    """
    replicas, total = len(update.replicas), summed_gradients(update)

    def fit(kind: FitKind, factors: Sequence[float], penalty: float = 0.0) -> GradientFit:
        weighted, residuals = _weighted_sum(update, factors), []
        for name, expected in reference.items():
            gradient = weighted.get(name, torch.zeros_like(expected))
            if penalty and name in weights:
                gradient = gradient - penalty * weights[name].double()
            amount, size = _largest(gradient - expected), _largest(expected)
            residuals.append(Difference(step=update.step, kind="gradient", name=name, amount=amount, size=size))
        return GradientFit(kind=kind, factors=tuple(factors), penalty=penalty, residuals=tuple(residuals))

    fits = []
    if shards is not None and any(shards):
        fits.append(fit("shares", [rows / sum(shards) for rows in shards]))
    # One factor over all parameters at once: it says that the loss is scaled, which no single tensor could.
    (factor,) = _least_squares([total], reference)
    fits.append(fit("uniform", [factor] * replicas))
    # A penalty that every replica adds in full is N - 1 times too often in the sum, and its gradient is a multiple of
    # the weights.
    rest = {name: gradient - reference[name] for name, gradient in total.items() if name in reference}
    (penalty,) = _least_squares([{name: weights[name] for name in rest if name in weights}], rest)
    fits.append(fit("weight penalty", [1.0] * replicas, penalty))
    columns = [
        _weighted_sum(update, [float(index == replica) for index in range(replicas)]) for replica in range(replicas)
    ]
    fits.append(fit("per replica", _least_squares(columns, reference)))
    return tuple(fits)


def _weighted_sum(update: UpdateRecord, factors: Sequence[float]) -> dict[str, Tensor]:
    count = sum(trace.count for trace in update.replicas) or 1.0
    result: dict[str, Tensor] = {}
    for factor, trace in zip(factors, update.replicas, strict=True):
        for name, gradient in trace.gradients.items():
            part = gradient.double() * (factor / count)
            result[name] = result[name] + part if name in result else part
    return result


def _least_squares(columns: Sequence[Mapping[str, Tensor]], target: Mapping[str, Tensor]) -> list[float]:
    """The factors of the columns whose sum is nearest to the target, over all parameters at once."""
    gram = torch.tensor([[_dot(a, b) for b in columns] for a in columns], dtype=torch.float64)
    right = torch.tensor([_dot(column, target) for column in columns], dtype=torch.float64)
    # The pseudo-inverse, because an empty shard makes a column of zeros:
    # test_an_empty_shard_has_no_factor_that_matters.
    factors: list[float] = (torch.linalg.pinv(gram, hermitian=True) @ right).tolist()
    return factors


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float(a[name].double().flatten() @ b[name].double().flatten()) for name in a if name in b)


# Runs.


ParameterPair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""The parameters of both runs, by name."""


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """One update of both runs."""

    step: int  # number of the update, from 1
    batch: BatchComparison = SAME_BATCH  # whether both got the same rows
    differences: tuple[Difference, ...] = ()  # of every tensor, in the order of a step, equal ones included
    fits: tuple[GradientFit, ...] = ()  # what explains the difference of the gradients, if there is one beyond rounding
    # the factor by which all weights moved further than on one replica; None if there is no one factor
    update_scale: float | None = None
    changed: tuple[str, ...] = ()  # parameters that changed outside the optimizer, in either run
    losses: tuple[float, ...] = ()  # what each replica back-propagated in the first run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, the second of which is taken to be right."""

    start: StartRecord  # start of the first run
    reference: StartRecord  # start of the second run
    initial: tuple[Difference, ...] = ()  # differences of the parameters before the first step
    steps: tuple[StepComparison, ...] = ()  # the updates that both runs made
    ends: tuple[EndRecord, EndRecord] = field(default=(EndRecord(), EndRecord()))  # how both runs ended
    extra: int = 0  # number of updates that only the first run made; negative if the second made more
    draws: bool = False  # whether a replica drew random numbers

    @property
    def unit(self) -> float:
        """Machine epsilon of the parameters' dtype."""
        return max(end.unit for end in self.ends)

    @property
    def coarse(self) -> float:
        """Machine epsilon of the coarsest dtype in use in either run."""
        return max(end.coarse for end in self.ends)

    @property
    def differences(self) -> Iterator[Difference]:
        yield from self.initial
        for step in self.steps:
            yield from step.differences

    def first(self, tolerance: Tolerance) -> Difference | None:
        """The first difference beyond rounding; among several of one step and kind, the largest relative one."""
        beyond = [difference for difference in self.differences if not tolerance.covers(difference)]
        return min(beyond, key=lambda difference: (difference.order, -difference.relative), default=None)

    def step(self, number: int) -> StepComparison:
        """The comparison of one update, from 1."""
        return next(step for step in self.steps if step.step == number)


def compare_starts(candidate: StartRecord, reference: StartRecord) -> tuple[Difference, ...]:
    """Compares the parameters before the first step."""
    return tuple(_by_name(0, "initial weight", candidate.parameters, reference.parameters))


def compare_updates(
    candidate: UpdateRecord, reference: UpdateRecord, before: ParameterPair, tolerance: Tolerance
) -> StepComparison:
    """Compares one update on N replicas with that on one; gradients that differ beyond ``tolerance`` are fitted."""
    step, first, reference_first = candidate.step, candidate.replicas[0], reference.replicas[0]
    batch = compare_batches(candidate.batches, reference.batches)
    expected = summed_gradients(reference)
    gradients = tuple(_by_name(step, "gradient", summed_gradients(candidate), expected))
    updated = first.parameters, reference_first.parameters
    changed_before, changed_after = (
        (first.changed_before, reference_first.changed_before),
        (first.changed_after, reference_first.changed_after),
    )
    differences = (
        _rows_difference(step, batch),
        *_changed(step, "weight changed before update", before, changed_before),
        *(_compare_outputs(step, candidate, reference) if batch.verdict == "same" else ()),
        _loss_difference(candidate, reference),
        *gradients,
        *_by_name(step, "weight", *updated),
        *_changed(step, "weight changed after update", updated, changed_after),
        *_by_name(step, "buffer", candidate.buffers, reference.buffers),
    )
    equal = all(tolerance.covers(gradient) for gradient in gradients)
    return StepComparison(
        step=step,
        batch=batch,
        differences=differences,
        fits=() if equal else fit_gradients(candidate, expected, shard_sizes(candidate.batches), before[1]),
        update_scale=_update_scale(updated, before),
        changed=tuple(
            dict.fromkeys(
                name for pair in (changed_before, changed_after) for parameters in pair for name in parameters
            )
        ),
        losses=tuple(trace.loss for trace in candidate.replicas),
    )


def _by_name(
    step: int, kind: Kind, candidate: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> Iterator[Difference]:
    for name in {**reference, **candidate}:
        yield tensor_difference(step, kind, name, candidate.get(name), reference.get(name))


def _changed(step: int, kind: Kind, before: ParameterPair, now: ParameterPair) -> Iterator[Difference]:
    """The parameters that changed in either run; the other run may still have the value from before."""
    for name in {**now[1], **now[0]}:
        candidate, reference = (
            changed.get(name, unchanged.get(name)) for changed, unchanged in zip(now, before, strict=True)
        )
        yield tensor_difference(step, kind, name, candidate, reference)


def _rows_difference(step: int, batch: BatchComparison) -> Difference:
    # The same rows in another order give the same sums.
    same = batch.verdict in ("same", "reordered")
    amount = 0.0 if same else float(max(1, len(batch.rows) - batch.common))
    return Difference(step=step, kind="rows", name=batch.name, amount=amount, size=float(len(batch.reference_rows)))


def _compare_outputs(step: int, candidate: UpdateRecord, reference: UpdateRecord) -> Iterator[Difference]:
    """Compares row by row, if all replicas together have as many rows as the single replica."""
    for (name, whole), (other_name, single) in zip(candidate.outputs, reference.outputs, strict=False):
        if name == other_name and whole is not None and single is not None and whole.shape == single.shape:
            yield tensor_difference(step, "output", name, whole, single)


def _loss_difference(candidate: UpdateRecord, reference: UpdateRecord) -> Difference:
    candidate_loss, reference_loss = _loss(candidate.replicas), _loss(reference.replicas)
    amount = math.inf if math.isnan(candidate_loss - reference_loss) else abs(candidate_loss - reference_loss)
    note = f"{candidate_loss:.6g} and {reference_loss:.6g}"
    return Difference(
        step=candidate.step, kind="loss", name="total", amount=amount, size=abs(reference_loss), note=note
    )


def _loss(replicas: Sequence[StepTrace]) -> float:
    if any(trace.total for trace in replicas):
        return sum(trace.total for trace in replicas) / sum(trace.count for trace in replicas)
    return sum(trace.loss for trace in replicas)


def _update_scale(after: ParameterPair, before: ParameterPair) -> float | None:
    """The one factor between the changes of all weights in both runs, to 1 %."""
    # A parameter that only one of the runs updates has no factor, and shows as a difference of its own.
    names = [name for name in after[1] if all(name in parameters for parameters in (after[0], *before))]
    candidate, reference = (
        [(new[name].double() - old[name].double()).flatten() for name in names]
        for new, old in zip(after, before, strict=True)
    )
    square = sum(float(parameters @ parameters) for parameters in reference)
    if not square:
        return None
    factor = sum(float(a @ b) for a, b in zip(candidate, reference, strict=True)) / square
    residual = sum(float((a - factor * b).square().sum()) for a, b in zip(candidate, reference, strict=True))
    return factor if residual <= 1e-4 * factor**2 * square else None
