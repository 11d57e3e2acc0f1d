from __future__ import annotations

import pytest
import torch

from lockstep_tools.verify.trace import KEPT_VALUES, fingerprints, some_values, tensors_with_rows


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_equal_rows_and_only_they_have_equal_fingerprints(dtype: torch.dtype):
    rows = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 1, 1]]).to(dtype)
    first, second, third = fingerprints(rows)
    assert first == third != second
    assert fingerprints(rows[1:]) == (second, third)  # of the row alone, whatever stands beside it


def test_a_single_bit_changes_the_fingerprint():
    rows = torch.zeros(1, 1000)
    changed = rows.clone()
    changed[0, 999] = torch.finfo(torch.float32).tiny
    assert fingerprints(rows) != fingerprints(changed)


def test_rows_without_values_and_no_rows_have_fingerprints_too():
    assert fingerprints(torch.zeros(2, 0)) == (0, 0)
    assert fingerprints(torch.zeros(0, 3)) == ()
    assert len(fingerprints(torch.arange(4))) == 4


def test_of_long_rows_some_values_are_kept():
    long = torch.arange(2.0 * 1000).reshape(2, 10, 100)
    kept = some_values(long)
    assert kept.shape == (2, 250)
    assert kept.shape[1] <= KEPT_VALUES
    assert torch.equal(kept, long.reshape(2, 1000)[:, ::4])
    assert torch.equal(some_values(torch.arange(3.0)), torch.arange(3.0)[:, None])


def test_what_is_kept_is_a_copy():
    rows = torch.zeros(2, 2)
    kept = some_values(rows)
    rows.fill_(1)
    assert kept.sum() == 0


def test_tensors_with_rows_are_found_by_their_place():
    x = torch.zeros(3)
    found = dict(tensors_with_rows(({"x": x, "n": 3}, [torch.tensor(1.0), x])))
    assert list(found) == ["[0]['x']", "[1][1]"]
