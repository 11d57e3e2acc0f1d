"""Were both runs fed the same rows? The question before all others. Pure.

Rows are known by their fingerprints. What is compared is the whole batch: the replicas' rows one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from lockstep.verify.record import BatchRecord, Leaf, Rows

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
