"""A step that changes its batch in place: the numbers of a plain loop, and nobody else's rows touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import assert_close, sgd, train, vectors
from torch import Tensor, nn

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
        self.shift, self.last = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64)), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-1, 1).mul_(2)
        x.add_(self.shift)
        out: Tensor = self.last(x)
        return out


def test_a_batch_changed_in_place_gives_the_weights_of_a_plain_loop(strategy):
    module, data = Augmented(), vectors((4, 4))
    alone = train(copy.deepcopy(module), copy.deepcopy(data)).module
    mirrored, optimizer = strategy.mirror(module), strategy.mirror(sgd(module.parameters()))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        ls.compute_average_loss(F.cross_entropy(mirrored(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(data):
        strategy.run(step, batch)
    assert_close(module, alone)


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
