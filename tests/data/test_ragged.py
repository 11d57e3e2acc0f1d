"""Packed sequences and nested tensors: their parts are what torch makes of the same sequences, and train as one device.

Batches of graphs are in tests/clients/test_graphs.py, with the library that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.data.readers import batch_digest
from lockstep.data.sharding import split_batch
from lockstep.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

Make = Callable[[Sequence[Tensor]], Any]
ROWS = (8, 8, 7, 8, 5, 8, 8, 2)
"""Of the batches; the last has fewer than three replicas."""


def sequences() -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(0)
    lengths = [torch.randint(1, 6, (rows,), generator=random).tolist() for rows in ROWS]
    return [[torch.randn(n, 5, generator=random, dtype=torch.float64) for n in of_batch] for of_batch in lengths]


def packed(rows: Sequence[Tensor]) -> PackedSequence:
    return pack_sequence(list(rows), enforce_sorted=False)


def packed_sorted(rows: Sequence[Tensor]) -> PackedSequence:
    return pack_sequence(sorted(rows, key=len, reverse=True))


def jagged(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def strided(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(list(rows))


MAKES: list[Make] = [packed, packed_sorted, jagged, strided]


def unpacked(value: Any) -> list[Tensor]:
    return unpack_sequence(value) if isinstance(value, PackedSequence) else list(value.unbind())


class Net(nn.Module):
    """A recurrent layer on packed sequences, a pool of a layer on nested tensors: [rows, 3]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.dense, self.head = (
            layer.double() for layer in (nn.GRU(5, 6), nn.Linear(5, 6), nn.Linear(6, 3))
        )

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, PackedSequence):
            return self.head(self.recurrent(x)[1][0])
        return self.head(torch.nested.to_padded_tensor(self.dense(x), 0.0).tanh().sum(1))


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_a_part_is_what_torch_makes_of_its_sequences(make: Make, replicas: int):
    rows = sequences()[0][:4]
    whole = unpacked(make(rows))
    shards = split_batch({"x": make(rows), "y": torch.arange(4)}, replicas)
    for shard, numbers in zip(shards, torch.arange(4).tensor_split(replicas), strict=True):
        assert shard["y"].tolist() == numbers.tolist()
        assert ls.has_rows(shard) == ls.has_rows(shard["x"]) == bool(len(numbers))
        if len(numbers):
            again = make([whole[number] for number in numbers.tolist()])
            assert type(shard["x"]) is type(again)
            pairs = zip(unpacked(shard["x"]), unpacked(again), strict=True)
            assert all(torch.equal(one, two) for one, two in pairs)
        if len(numbers) and isinstance(again, PackedSequence):
            assert (shard["x"].sorted_indices is None) == (again.sorted_indices is None)


def test_jagged_tensors_of_one_structure_stay_so():
    x = jagged(sequences()[0])
    for shard in split_batch((x, x * 2), 3):
        assert torch.equal((shard[0] + shard[1]).values(), shard[0].values() * 3)


def test_a_transposed_jagged_tensor_is_refused():
    with pytest.raises(DataError, match="is transposed, or has holes"):
        split_batch(jagged(sequences()[0]).transpose(1, 2), 2)


@pytest.mark.parametrize("make", MAKES)
def test_workers_that_have_other_values_are_told_apart(make: Make):
    one, other = (make([row + number for row in sequences()[0]]) for number in (0, 1))
    assert batch_digest([one]) == batch_digest([make(sequences()[0])]) != batch_digest([other])


def one_device(make: Make) -> dict[str, Tensor]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.3)
    for rows in sequences():
        F.cross_entropy(net(make(rows)), torch.arange(len(rows)) % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_loop_trains_as_one_device(make: Make, replicas: int, make_strategy: MakeStrategy):
    strategy, net = make_strategy(replicas), Net()
    model = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.3))

    def step(x: Any, y: Tensor) -> None:
        losses = F.cross_entropy(model(x), y, reduction="none") if ls.has_rows(x) else torch.zeros(0)
        loss = ls.compute_average_loss(losses)
        if len(y):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [(make(rows), torch.arange(len(rows)) % 3) for rows in sequences()]
    for batch in strategy.distribute_dataset(batches):
        strategy.run(step, batch)
    torch.testing.assert_close(net.state_dict(), one_device(make), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", MAKES)
def test_fit_evaluate_and_predict_take_them(make: Make, make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), Net()
    batches = [(make(rows), torch.arange(len(rows)) % 3) for rows in sequences()]
    with strategy.scope():
        model = ls.Model(net)
        model.compile(optimizer=torch.optim.SGD(net.parameters(), 0.3), loss=nn.CrossEntropyLoss())
        model.fit(batches, verbose=0)
        expected = one_device(make)
        torch.testing.assert_close(net.state_dict(), expected, rtol=0, atol=1e-12)
        alone = Net()
        alone.load_state_dict(expected)
        outputs = torch.cat([alone(x) for x, _ in batches]).detach()
        torch.testing.assert_close(model.predict(batches), outputs, rtol=0, atol=1e-12)
        logs = model.evaluate(batches, verbose=0)
    labels = torch.cat([y for _, y in batches])
    assert logs["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item())


def test_replicas_collate_their_rows_themselves():
    rows = [row for batch in sequences() for row in batch]
    loader = DataLoader(rows, batch_size=8, collate_fn=packed)
    with closing(ls.MirroredStrategy(["cpu:0"], replicas=3)) as strategy:
        for batch, whole in zip(strategy.distribute_dataset(loader), loader, strict=True):
            parts = [row for shard in batch if ls.has_rows(shard) for row in unpack_sequence(shard)]
            assert all(torch.equal(one, two) for one, two in zip(parts, unpack_sequence(whole), strict=True))
