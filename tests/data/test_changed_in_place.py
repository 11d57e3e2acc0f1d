"""A step that changes its batch in place: the numbers of a plain loop, and nobody else's rows touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.config import LogicalDevice


@pytest.fixture
def strategy(split_cpu: Callable[[int], tuple[LogicalDevice, ...]]) -> Iterator[ls.MirroredStrategy]:
    with closing(ls.MirroredStrategy(list(split_cpu(3)))) as made:
        yield made


class Augmented(nn.Module):
    """Adds a trained shift to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.last = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64)), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-1, 1).mul_(2)
        x.add_(self.shift)
        out: Tensor = self.last(x)
        return out


def made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    module = Augmented()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    return module, optimizer, torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)


def loader(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), batch_size=4)


def test_a_batch_changed_in_place_gives_the_weights_of_a_plain_loop(strategy):
    plain, optimizer, x, y = made()
    for _ in range(2):
        for rows, targets in loader(x, y):
            optimizer.zero_grad()
            ((plain(rows) - targets) ** 2).mean().backward()
            optimizer.step()

    module, optimizer, x, y = made()
    mirrored, mirrored_optimizer = strategy.mirror(module), strategy.mirror(optimizer)

    def step(rows: Tensor, targets: Tensor) -> None:
        mirrored_optimizer.zero_grad()
        ls.compute_average_loss(((mirrored(rows) - targets) ** 2).flatten()).backward()
        mirrored_optimizer.step()

    data = strategy.distribute_dataset(loader(x, y))
    for _ in range(2):
        for batch in data:
            strategy.run(step, batch)
    torch.testing.assert_close(module.state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-12)


def test_a_tensor_that_is_the_callers_own_changes_as_on_one_device(strategy):
    mine, expected = torch.arange(8.0), torch.arange(8.0)
    seen: list[list[float]] = []
    for _ in range(2):
        expected.clamp_(max=5).add_(1)
        seen.append(expected.tolist())

    def step(x: Tensor) -> Tensor:
        return x.clamp_(max=5).add_(1)

    data = strategy.distribute_dataset([mine])
    found = [strategy.gather(strategy.run(step, (batch,)), axis=0).tolist() for _ in range(2) for batch in data]
    assert found == seen
    assert mine.tolist() == expected.tolist()


def test_one_value_for_all_replicas_changed_in_place_is_refused(strategy):
    (batch,) = strategy.distribute_dataset([(torch.ones(6), torch.tensor(1.0))])
    with pytest.raises(ls.errors.UsageError) as raised:
        strategy.run(lambda x, scale: scale.mul_(2), batch)
    assert "in place" in str(raised.value)
    assert "clone" in str(raised.value)
