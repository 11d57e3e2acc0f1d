"""What recorded steps read: every tensor of a batch, those in lists of rows too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.stand_in import stand_in_gpus
from tests.train.cuda_graphs.conftest import Train, alike
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.structure import RowList
from lockstep.train.cuda_graphs import NotCapturableError, _flat, _form


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
@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "elsewhere"])
def test_tensors_without_a_fixed_address_are_not_recorded(odd: Tensor) -> None:
    with stand_in_gpus(None) as (devices, _), pytest.raises(NotCapturableError, match=str(odd.layout)):
        _flat((PerReplica([odd]),), SimpleNamespace(devices=devices))  # type: ignore[arg-type]


def test_batches_of_one_kind_have_equal_shapes_and_plain_values() -> None:
    def kind(rows: int, number: float) -> object:
        with stand_in_gpus(None) as (devices, _):
            batch = (PerReplica([RowList([torch.ones(rows)])]), number)
            leaves, structure = _flat(batch, SimpleNamespace(devices=devices))  # type: ignore[arg-type]
        return (structure, *map(_form, leaves))

    assert kind(2, 1.0) == kind(2, 1.0)
    assert len({kind(2, 1.0), kind(3, 1.0), kind(2, 2.0), kind(2, True)}) == 4
