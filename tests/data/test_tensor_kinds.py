"""Sparse, nested and packed tensors in a batch: equal to a plain loop on one device, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import lockstep as ls
from lockstep.data.readers import batch_digest
from lockstep.data.sharding import split_batch
from lockstep.errors import DataError


def dense(rows: int = 7) -> Tensor:
    random = torch.Generator().manual_seed(1)
    values = torch.randn(rows, 5, dtype=torch.float64, generator=random)
    return values * (torch.rand(rows, 5, generator=random) < 0.4)


class FromSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 2), 0.3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


class FromNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.last(row).tanh().mean(0) for row in x.unbind()])


class FromPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 2, batch_first=True).double()

    def forward(self, x: PackedSequence) -> Tensor:
        out, last = self.recurrent(x)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return last[0] + padded.sum(1)


def sequences(lengths: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randn(length, 4, dtype=torch.float64, generator=random) for length in lengths]


LENGTHS = (2, 5, 1, 4, 3, 3, 6)
CASES: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "coo": (FromSparse, lambda: dense().to_sparse_coo()),
    "coo, not coalesced": (
        FromSparse,
        lambda: torch.sparse_coo_tensor(
            torch.tensor([[0, 6, 0, 3], [1, 4, 1, 2]]), torch.tensor([1.0, 2, 3, 4]).double(), (7, 5)
        ),
    ),
    "csr": (FromSparse, lambda: dense().to_sparse_csr()),
    "nested": (FromNested, lambda: torch.nested.nested_tensor(sequences(LENGTHS))),
    "jagged": (FromNested, lambda: torch.nested.nested_tensor(sequences(LENGTHS), layout=torch.jagged)),
    "packed": (FromPacked, lambda: pack_sequence(sequences(LENGTHS), enforce_sorted=False)),
    "packed, sorted": (FromPacked, lambda: pack_sequence(sequences(tuple(sorted(LENGTHS, reverse=True))))),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CASES)
def test_a_step_trains_as_on_one_device(make_strategy, name: str):
    make_module, make_batch = CASES[name]
    y = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    module, alone = make_module(), make_module()
    alone.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (alone(make_batch()) - y).square().mean().backward()
        optimizer.step()

    strategy = make_strategy(3)
    mirrored, mirrored_optimizer = strategy.mirror(module), strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(x: Any, y: Tensor) -> None:
        mirrored_optimizer.zero_grad()
        ls.compute_average_loss((mirrored(x) - y).square().mean(1)).backward()
        mirrored_optimizer.step()

    for batch in strategy.distribute_dataset([(make_batch(), y)] * 2):
        strategy.run(step, batch)
    torch.testing.assert_close(module.state_dict(), dict(alone.state_dict()), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CASES)
def test_a_batch_has_a_digest(name: str):
    assert batch_digest((CASES[name][1](), torch.ones(7))) == batch_digest((CASES[name][1](), torch.ones(7)))


@pytest.mark.parametrize("name", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_an_empty_shard_of_a_sparse_tensor_is_sparse(name: str):
    kind = dense(2).to_sparse_coo() if name == "coo" else dense(2).to_sparse_csr()
    shards = split_batch((kind, torch.ones(2)), 3)
    assert [tuple(x.shape) for x, _ in shards] == [(1, 5), (1, 5), (0, 5)]
    assert {x.layout for x, _ in shards} == {kind.layout}
    assert torch.equal(torch.cat([x.to_dense() for x, _ in shards]), dense(2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["nested", "jagged", "packed"])
def test_what_cannot_be_empty_is_refused_where_a_shard_would_be(name: str):
    with pytest.raises(DataError) as raised:
        split_batch((CASES[name][1](), torch.ones(7)), 8)
    assert "drop_last" in str(raised.value)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_layout_without_rows_is_refused_by_name():
    with pytest.raises(DataError) as raised:
        split_batch((dense(4).to_sparse_csc(), torch.ones(4)), 2)
    assert all(word in str(raised.value) for word in ("x", "sparse_csc", "sparse_csr"))
