"""The rules by which numbers of shards become that of the batch, and the join of what steps return. Pure."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.integrations.lightning.joined import joined
from lockstep.integrations.lightning.values import Part, candidates, combined, fits, weights_of

CPU = torch.device("cpu")


def parts(*values: float, **named: Any) -> list[Part]:
    return [Part(value=value, rows=rows, **named) for value, rows in zip(values, (3, 1), strict=False)]


def test_a_mean_is_weighed_by_what_it_is_over() -> None:
    assert combined("rows", parts(1.0, 5.0)) == 2.0
    counted = [Part(value=1.0, rows=3, count=1.0), Part(value=5.0, rows=1, count=3.0)]
    assert combined("count", counted) == 4.0
    assert combined("sum", parts(1.0, 5.0)) == 6.0
    assert (combined("max", parts(1.0, 5.0)), combined("min", parts(1.0, 5.0))) == (5.0, 1.0)


def test_equal_numbers_are_not_rounded() -> None:
    assert combined("rows", [Part(value=0.1, rows=rows) for rows in (3, 3, 1)]) == 0.1
    assert combined("sum", parts(2, 3)) == 5
    assert type(combined("sum", parts(2, 3))) is int


def test_a_shard_whose_mean_is_over_nothing_counts_as_nothing() -> None:
    counted = [Part(value=math.nan, rows=3, count=0.0), Part(value=5.0, rows=1, count=3.0)]
    assert weights_of("count", counted) == [0.0, 1.0]
    assert combined("count", counted) == 5.0


def test_the_rule_is_the_first_that_fits_the_halves() -> None:
    def first(whole: float, *halves: float) -> str | None:
        of_halves = [Part(value=half, rows=2) for half in halves]
        tried = candidates(of_halves, "rows")
        whole_part = Part(value=whole, rows=4)
        return next((rule for rule in tried if fits(rule, whole_part, of_halves, tolerance=1e-4)), None)

    assert [first(2.0, 1.0, 3.0), first(4.0, 1.0, 3.0), first(3.0, 1.0, 3.0)] == ["rows", "sum", "max"]
    assert first(2.5, 1.0, 3.0) is None


def test_outputs_are_joined_in_the_order_of_the_rows() -> None:
    shards = [
        {
            "out": torch.arange(3.0),
            "loss": torch.tensor(1.0),
            "names": ["a", "b", "c"],
            "pair": (torch.ones(3, 2), None),
        },
        {"out": torch.arange(3.0, 4.0), "loss": torch.tensor(5.0), "names": ["d"], "pair": (torch.ones(1, 2), None)},
    ]
    whole = joined(shards, [3, 1], CPU, "the output")
    torch.testing.assert_close(whole["out"], torch.arange(4.0))
    assert (whole["loss"], whole["names"], whole["pair"][0].shape) == (2.0, ["a", "b", "c", "d"], (4, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.zeros(7), torch.ones(7)], r"x has shapes \(7,\), \(7,\) for shards of 3, 1 rows"),
        ([[1, 2], [3]], "x has 2, 1 items for shards of 3, 1 rows"),
        (["a", "b"], "x is a str that differs between the replicas"),
    ],
)
def test_what_cannot_be_told_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        joined(values, [3, 1], CPU, "x")
