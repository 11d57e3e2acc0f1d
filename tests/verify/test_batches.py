from __future__ import annotations

import pytest

from lockstep.verify.compare import compare_batches, shard_sizes
from lockstep.verify.trace import BatchRecord, BatchTensor


def batch(*replicas: tuple[int, ...]) -> BatchRecord:
    return BatchRecord(arguments=(BatchTensor(name="x", replicas=replicas),))


@pytest.mark.parametrize(
    ("ours", "reference", "verdict", "common"),
    [
        (batch((1, 2), (3,)), batch((1, 2, 3)), "same", 3),
        (batch((1, 2), (3,), ()), batch((1, 2, 3)), "same", 3),
        (batch((1, 2), (1, 2)), batch((1, 2)), "undistributed", 2),
        (batch((1, 2), (3, 4)), batch((1, 2)), "scaled", 2),
        (batch((2, 1), (3,)), batch((1, 2, 3)), "reordered", 3),
        (batch((1, 4), (3,)), batch((1, 2, 3)), "different", 2),
    ],
)
def test_the_verdict_on_one_batch(ours: BatchRecord, reference: BatchRecord, verdict: str, common: int):
    found = compare_batches([ours], [reference])

    assert (found.verdict, found.common) == (verdict, common)


def test_another_number_of_batches_is_counted():
    found = compare_batches([batch((1,)), batch((2,))], [batch((1,))])

    assert (found.verdict, found.batches) == ("count", (2, 1))


def test_a_constant_beside_divided_rows_is_no_fault():
    constant = BatchTensor(name="weights", replicas=((7, 8), (7, 8)))
    ours = BatchRecord(arguments=(constant, *batch((1,), (2,)).arguments))
    reference = BatchRecord(arguments=(BatchTensor(name="weights", replicas=((7, 8),)), *batch((1, 2)).arguments))

    assert compare_batches([ours], [reference]).verdict == "same"
    assert compare_batches([ours], [reference]).name == "x"
    assert shard_sizes([ours]) == (1, 1)


def test_a_batch_that_came_past_the_arguments_is_known_by_what_the_module_got():
    constant = BatchTensor(name="weights", replicas=((7, 8), (7, 8)))
    ours = BatchRecord(arguments=(constant,), inputs=batch((1,), (2,)).arguments)
    reference = BatchRecord(
        arguments=(BatchTensor(name="weights", replicas=((7, 8),)),), inputs=batch((1, 2)).arguments
    )

    assert compare_batches([ours], [reference]).verdict == "same"


def test_shards_of_an_accumulated_update_are_added_up():
    assert shard_sizes([batch((1, 2), (3,)), batch((4,), ())]) == (3, 1)
    assert shard_sizes([BatchRecord()]) is None
