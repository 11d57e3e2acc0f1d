from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy, here
from torch import Tensor

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError
from lockstep.strategies.average_loss import compute_average_loss, scale_regularization_loss

LOSSES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
SHARDS = PerReplica([LOSSES[:2], LOSSES[2:4], LOSSES[4:], LOSSES[:0]])


@pytest.mark.parametrize("size", [None, 5])
def test_the_parts_add_up_to_the_average_of_the_global_batch(size: int | None, make_strategy: MakeStrategy):
    strategy = make_strategy(4)
    parts = strategy.run(compute_average_loss, (SHARDS,), {"global_batch_size": size})
    assert [float(part) for part in parts] == pytest.approx([3 / 5, 7 / 5, 5 / 5, 0.0])
    assert float(strategy.reduce("sum", parts)) == pytest.approx(float(LOSSES.mean()))


@pytest.mark.parametrize("weight", [torch.tensor([1.0, 0.0]), torch.tensor([[1.0], [0.0]])])
def test_weights_multiply_and_the_divisor_stays_the_number_of_examples(weight: Tensor):
    losses = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert float(compute_average_loss(losses, sample_weight=weight)) == pytest.approx(2.0)
    assert float(compute_average_loss(losses, sample_weight=weight, global_batch_size=8)) == pytest.approx(0.5)


def test_a_weight_per_column_says_so_by_its_dimensions():
    """In a shard of 3 rows it would else be one per row."""
    weight = torch.tensor([1.0, 0.0, 2.0])
    for rows in (2, 3):
        losses = torch.arange(3.0 * rows).reshape(rows, 3)
        expected = float((losses * weight).sum()) / rows
        assert float(compute_average_loss(losses, sample_weight=weight[None])) == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"shape \(3,\), but the losses have \(2, 3\)"):
        compute_average_loss(torch.ones(2, 3), sample_weight=weight)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_loss_of_the_labels_that_count_is_that_of_one_device(replicas: int, make_strategy: MakeStrategy):
    """As the module's docstring has it; all labels of the first shard are ignored."""
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(7, 4, generator=random, dtype=torch.float64)
    labels = torch.tensor([-100, -100, -100, -100, 2, -100, 1])
    expected = scores.clone().requires_grad_()
    F.cross_entropy(expected, labels).backward()

    def step(scores: Tensor, labels: Tensor) -> Tensor:
        scores.requires_grad_()
        total = F.cross_entropy(scores, labels, reduction="sum")
        (total / here().all_reduce("sum", (labels != -100).sum())).backward()
        assert scores.grad is not None
        return scores.grad

    strategy = make_strategy(replicas)
    shards = [PerReplica(list(each.clone().tensor_split(replicas))) for each in (scores, labels)]
    found = torch.cat(strategy.local_results(strategy.run(step, tuple(shards))))

    torch.testing.assert_close(found, expected.grad)


def test_outside_a_scope_it_is_one_device():
    assert float(compute_average_loss(LOSSES)) == 3.0
    assert float(compute_average_loss(LOSSES[:0])) == 0.0
    assert float(scale_regularization_loss(torch.tensor(6.0))) == 6.0


@pytest.mark.parametrize("number", [0, 6.0])
def test_a_number_is_a_regularization_loss_too(number: float, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    parts = strategy.run(scale_regularization_loss, (number,))
    assert [part.item() for part in parts] == [number / 2] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute_average_loss(torch.tensor(1.0)), 'the loss is a scalar, .*use reduction="none"'),
        (lambda: compute_average_loss(LOSSES, global_batch_size=0), "global_batch_size=0 was given, expected"),
        (lambda: compute_average_loss(LOSSES, global_batch_size=True), "global_batch_size=True was given, expected"),
        (lambda: compute_average_loss(LOSSES, global_batch_size=2.5), "global_batch_size=2.5 was given, expected"),  # type: ignore[arg-type]
        (
            lambda: compute_average_loss(LOSSES, sample_weight=torch.ones(3)),
            r"shape \(3,\), but the losses have \(5,\)",
        ),
    ],
)
def test_losses_that_cannot_be_averaged(call: Callable[[], Any], message: str):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_regularisation_counts_once(make_strategy: MakeStrategy):
    strategy = make_strategy(4)
    parts = strategy.run(scale_regularization_loss, (torch.tensor([2.0, 4.0]),))
    assert [float(part) for part in parts] == [1.5] * 4
    assert float(strategy.reduce("sum", parts)) == 6.0


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: compute_average_loss(LOSSES), "call it inside the function given to strategy.run"),
        (lambda: scale_regularization_loss(LOSSES), "belongs inside the function given to strategy.run"),
    ],
)
def test_in_cross_replica_context_they_are_refused(call: Callable[[], Any], where: str, make_strategy: MakeStrategy):
    with make_strategy(2).scope(), pytest.raises(UsageError, match=where):
        call()
