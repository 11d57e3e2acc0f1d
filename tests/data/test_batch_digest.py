"""What two batches, or two drawings of indices, must have alike to have one digest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.data.readers import batch_digest, index_digest


class Place:
    """An index of the user's own, whose address differs from process to process."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0, 1], [1, 0]),
        ([(0, "a")], [(0, "b")]),
        ([[0, (1, 2)]], [[0, (1, 3)]]),
        ([torch.tensor(1)], [torch.tensor(2)]),
        ([0], ["0"]),
        ([Place()], [0]),
    ],
)
def test_other_indices_have_another_digest(one: list[Any], other: list[Any]):
    assert index_digest(one) != index_digest(other)


@pytest.mark.parametrize("make", [lambda: [3, (1, "a"), None], lambda: [torch.tensor([1, 2])], lambda: [(Place(), 1)]])
def test_the_same_indices_have_the_same_digest_in_every_process(make):
    assert index_digest(make()) == index_digest(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.arange(1000), torch.arange(1000).flip(0)),
        ({"x": torch.zeros(1)}, {"y": torch.zeros(1)}),
        ((torch.zeros(1), 1), (torch.zeros(1), 2)),
        ((torch.zeros(1), "a"), (torch.zeros(1), "b")),
    ],
)
def test_other_batches_have_another_digest(one: Any, other: Any):
    assert batch_digest(one) != batch_digest(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.arange(1000).view(10, 100).t(), {"y": [1, None, 2.5]}),
        lambda: torch.zeros(0, 3),
        lambda: torch.eye(3).to_sparse(),
        lambda: (torch.zeros(2), Place()),
    ],
)
def test_the_same_batch_has_the_same_digest_in_every_process(make):
    assert batch_digest(make()) == batch_digest(make())
