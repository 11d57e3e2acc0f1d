"""What recorded steps read: every tensor of a batch, those in lists of rows too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.cuda_graphs.conftest import Train, alike
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.structure import RowList
from lockstep.train.cuda_graphs.capture import StaticInputs, signature, tensors
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


def test_the_rows_of_a_list_have_fixed_addresses() -> None:
    first = PerReplica([RowList([torch.ones(2), torch.ones(3)])])
    inputs = StaticInputs((first,))
    inputs.take((PerReplica([RowList([torch.zeros(2), torch.zeros(3)])]),))
    assert [each.sum().item() for each in tensors(inputs.batch)] == [0, 0]
    assert first[0][0].sum() == 2


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_a_fixed_address_are_not_recorded() -> None:
    for odd in (torch.eye(2).to_sparse(), nn.utils.rnn.pack_sequence([torch.ones(2, 1)])):
        with pytest.raises(NotCapturableError, match="sparse"):
            signature((PerReplica([odd]),))
