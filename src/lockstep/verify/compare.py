"""Compares the records of two runs: what belongs together, in the order in which a step makes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.verify.batches import SAME, BatchComparison, compare_batches, shard_sizes
from lockstep.verify.difference import Allowance, Difference, Kind, tensor_difference
from lockstep.verify.gradients import Weighting, summed, weightings
from lockstep.verify.record import EndRecord, OutputRecord, StartRecord, UpdateRecord


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
