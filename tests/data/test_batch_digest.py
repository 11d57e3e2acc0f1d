"""What two batches, or two drawings of indices, must have alike to have one digest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.data.readers import batch_digest, index_digest


class Place:
    """An index of the user's own, whose address differs from process to process."""


@pytest.mark.parametrize(
    ("digest", "one", "other"),
    [
        (index_digest, [0, 1], [1, 0]),
        (index_digest, [(0, "a")], [(0, "b")]),
        (index_digest, [[0, (1, 2)]], [[0, (1, 3)]]),
        (index_digest, [torch.tensor(1)], [torch.tensor(2)]),
        (index_digest, [0], ["0"]),
        (index_digest, [Place()], [0]),
        (batch_digest, torch.zeros(3), torch.zeros(4)),
        (batch_digest, torch.zeros(2, 3), torch.zeros(3, 2)),
        (batch_digest, torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (batch_digest, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (batch_digest, torch.arange(1000), torch.arange(1000).flip(0)),
        (batch_digest, {"x": torch.zeros(1)}, {"y": torch.zeros(1)}),
        (batch_digest, (torch.zeros(1), 1), (torch.zeros(1), 2)),
        (batch_digest, (torch.zeros(1), "a"), (torch.zeros(1), "b")),
    ],
)
def test_others_have_another_digest(digest: Any, one: Any, other: Any):
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("digest", "make"),
    [
        (index_digest, lambda: [3, (1, "a"), None]),
        (index_digest, lambda: [torch.tensor([1, 2])]),
        (index_digest, lambda: [(Place(), 1)]),
        (batch_digest, lambda: (torch.arange(1000).view(10, 100).t(), {"y": [1, None, 2.5]})),
        (batch_digest, lambda: torch.zeros(0, 3)),
        (batch_digest, lambda: torch.eye(3).to_sparse()),
        (batch_digest, lambda: (torch.zeros(2), Place())),
    ],
)
def test_the_same_has_the_same_digest_in_every_process(digest: Any, make: Any):
    assert digest(make()) == digest(make())
