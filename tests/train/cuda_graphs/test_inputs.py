"""What recorded steps read: every tensor of a batch, those in lists of rows too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.cuda_graphs.conftest import Train, alike
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.structure import RowList
from lockstep.train.cuda_graphs.capture import StepInputs
from lockstep.train.cuda_graphs.guards import NotCapturableError


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, rows: list[Tensor]) -> Tensor:
        out: Tensor = self.last(torch.stack([row.flatten() for row in rows]))
        return out


def data() -> list[Any]:
    random = torch.Generator().manual_seed(1)
    return [
        ([torch.randn(2, 3, generator=random) for _ in range(8)], torch.randint(0, 3, (8,), generator=random))
        for _ in range(6)
    ]


def test_lists_of_rows_are_recorded_as_they_are_trained(train: Train) -> None:
    torch.manual_seed(0)
    module = Stacked()
    plain = train(module, data(), graphs=False)
    recorded = train(module, data())
    assert sum(recorded.replays) > 0
    assert alike(plain, recorded)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_a_fixed_address_are_not_recorded() -> None:
    for odd in (torch.eye(2).to_sparse(), nn.utils.rnn.pack_sequence([torch.ones(2, 1)])):
        with pytest.raises(NotCapturableError, match=r"sparse|PackedSequence"):
            StepInputs.of((PerReplica([odd]),), 1)


def test_batches_of_one_signature_have_equal_shapes_and_plain_values() -> None:
    def signature(rows: int, number: float) -> object:
        return StepInputs.of((PerReplica([RowList([torch.ones(rows)])]), number), 1).signature()

    assert signature(2, 1.0) == signature(2, 1.0)
    assert len({signature(2, 1.0), signature(3, 1.0), signature(2, 2.0), signature(2, True)}) == 4
