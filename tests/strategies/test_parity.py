"""The user's own loop: 1 to 4 replicas give the numbers of a hand-written loop on one device.

In float64, so that what is left of a difference is the order of additions; averaging the replicas' means instead of
adding their parts is off by more than 1e-3 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from tests.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.strategies.average_loss import compute_average_loss, scale_regularization_loss
from lockstep.strategies.mirrored import MirroredStrategy

SIZES = (7, 8, 1, 5, 2)  # the last ones are smaller than the number of replicas
Batch = tuple[Tensor, Tensor, Tensor]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
}


def batches(dtype: torch.dtype = torch.float64) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, 4, generator=random, dtype=dtype),
            torch.randint(3, (n,), generator=random),
            torch.rand(n, generator=random, dtype=dtype) * 2,
        )
        for n in SIZES
    ]


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)).double()


def penalty(module: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in module.parameters()]).sum() * 1e-2


def alone(make: Callable[..., torch.optim.Optimizer], weighted: bool) -> oracle.Training:
    module = net()

    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        labels, weight = targets
        per_example = F.cross_entropy(outputs, labels, reduction="none")
        total = (per_example * weight if weighted else per_example).sum()
        return total + penalty(module) * len(outputs), len(outputs)

    return oracle.train(module, [(x, (y, weight)) for x, y, weight in batches()], make, loss)


@pytest.mark.parametrize("size", ["given", "added up"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_on_replicas_is_the_loop_on_one_device(
    name: str, replicas: int, weighted: bool, size: str, make_strategy: MakeStrategy
):
    strategy = make_strategy(replicas)
    module = net()
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(OPTIMIZERS[name](module.parameters()))

    def step(x: Tensor, y: Tensor, weight: Tensor, rows: int | None) -> Tensor:
        optimizer.zero_grad()
        per_example = F.cross_entropy(mirrored(x), y, reduction="none")
        loss = compute_average_loss(
            per_example, sample_weight=weight if weighted else None, global_batch_size=rows
        ) + scale_regularization_loss(penalty(mirrored))
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    with strategy.scope():
        for rows, batch in zip(SIZES, strategy.distribute_dataset(batches()), strict=True):
            given = rows if size == "given" else None
            losses.append(float(strategy.reduce("sum", strategy.run(step, (*batch, given)))))

    expected = alone(OPTIMIZERS[name], weighted)
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    for duplicate in mirrored.copies:
        oracle.assert_close(duplicate, expected.module)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_averaging_means_would_be_seen(replicas: int):
    x, y, _ = batches()[0]
    module = net()
    shards = zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True)
    with torch.no_grad():
        whole = F.cross_entropy(module(x), y)
        means = [F.cross_entropy(module(a), b) for a, b in shards]
    assert abs(float(torch.stack(means).mean() - whole)) > 1e-3


def trained(strategy: MirroredStrategy) -> tuple[dict[str, Tensor], list[PerReplica[Tensor]]]:
    """Weights after six epochs with dropout, and which units each replica dropped beside it."""
    module = net(dropout=0.5)
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), 0.05))

    def step(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        optimizer.zero_grad()
        compute_average_loss(F.cross_entropy(mirrored(x), y, reduction="none")).backward()
        optimizer.step()
        return F.dropout(torch.ones(16), 0.5) == 0

    dataset = strategy.distribute_dataset(batches())
    dropped = [strategy.run(step, batch) for _ in range(6) for batch in dataset]
    return {name: value.clone() for name, value in mirrored.state_dict().items()}, dropped


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_same_program_is_bit_equal_and_another_seed_is_not(replicas: int, make_strategy: MakeStrategy):
    # Thirty steps: the issue policy tries replicas in parallel and one after another, and settles, as it goes.
    (first, masks), (again, _), (other, _) = (trained(make_strategy(replicas, seed=seed)) for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert any(not torch.equal(step[0], step[1]) for step in masks)
    different = sum(int((step[0] != step[1]).sum()) for step in masks)
    assert different > len(masks) * 4  # of 16 units, half differ by chance
