"""Numbers that a step reads from a shard by Python or NumPy, and computes its loss with, are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

LossOfStep = Callable[[nn.Module, Tensor, Tensor], Tensor]

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(10, 8, generator=GENERATOR)
Y = torch.tensor([1.0, 0, 1, 0, 1, 0, 0, 0, 1, 0]).unsqueeze(1)  # 3 of the first five rows, 1 of the others
SEEN: list[float] = []


def squares(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses: Tensor = (module(x) - y).square().mean(1)
    return losses


def average(losses: Tensor) -> Tensor:
    return ls.compute_average_loss(losses, global_batch_size=10)


def positive_weight(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    positives = int(y.sum().item())
    weight = torch.tensor((len(y) - positives) / positives)
    losses = F.binary_cross_entropy_with_logits(module(x), y, pos_weight=weight, reduction="none")
    return average(losses.squeeze(1))


def weights_of_classes(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = np.bincount(y.long().squeeze(1).numpy(), minlength=2)
    weight = torch.from_numpy((counts.sum() / (2 * counts)).astype("float32"))
    logits = module(x)
    labels = y.long().squeeze(1)
    return average(F.cross_entropy(torch.cat([-logits, logits], 1), labels, weight=weight, reduction="none"))


def count_of_the_shard(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (squares(module, x, y) * y.squeeze(1)).sum() / int(y.sum())


def centred(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = module(x)
    return average((outputs - float(outputs.detach().mean()) - y).square().mean(1))


def divided_by_itself(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = squares(module, x, y)
    losses /= losses.sum().item()
    return average(losses)


def logged(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    SEEN.append(y.sum().item())
    loss = average(squares(module, x, y) * 0.5)
    SEEN.append(loss.item())
    return loss


def average_for_the_log(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = average(squares(module, x, y))
    SEEN.append(float(0.9 * torch.zeros(()) + 0.1 * loss.item()))
    return loss


def share_of_the_batch(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    SEEN.append(y.sum().item())
    return average(squares(module, x, y)).div(len(x)).mul(len(x))


def labels_by_a_list(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    labels = torch.tensor([2 * label for label in y.squeeze(1).tolist()])
    return average((module(x).squeeze(1) - labels).square())


def count_of_all(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    context = ls.get_replica_context()
    count = y.sum() if context is None else context.all_reduce("sum", y.sum())
    return (squares(module, x, y) * y.squeeze(1)).sum() / count.item()


def warnings_of(make_strategy: MakeStrategy, loss_of: LossOfStep) -> list[str]:
    strategy = make_strategy(2)
    module = strategy.mirror(nn.Linear(8, 1))
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), lr=0.1))

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(module, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.distribute_dataset([(X, Y)] * 3):
            strategy.run(step, batch)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("loss_of", "call", "numbers"),
    [
        (positive_weight, "binary_cross_entropy_with_logits", ("0.666667", "4")),
        (weights_of_classes, "cross_entropy", ("1.25", "0.625")),
        (count_of_the_shard, "div", ("3", "1")),
        (centred, "sub", ()),
        (divided_by_itself, "div", ()),
    ],
)
def test_a_number_of_each_shard_is_told_of_once_with_its_line(
    make_strategy: MakeStrategy, loss_of: LossOfStep, call: str, numbers: tuple[str, ...]
) -> None:
    (message,) = [message for message in warnings_of(make_strategy, loss_of) if "has read numbers" in message]
    assert f"{call} (test_read_numbers.py:" in message
    assert f" in {loss_of.__name__})" in message
    assert all(f" {number} in " in message for number in numbers)
    assert "all_reduce" in message


@pytest.mark.parametrize("loss_of", [logged, average_for_the_log, share_of_the_batch, labels_by_a_list, count_of_all])
def test_numbers_that_are_only_shown_or_the_same_for_all_are_not_told_of(
    make_strategy: MakeStrategy, loss_of: LossOfStep
) -> None:
    assert warnings_of(make_strategy, loss_of) == []


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return outputs / outputs.detach().std().item()


def test_fit_tells_of_a_number_that_its_model_reads(make_strategy: MakeStrategy) -> None:
    with make_strategy(2).scope():
        module = Scaled()
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=0.1), nn.MSELoss())
    with pytest.warns(
        UserWarning, match=r"the model or its loss has read numbers .* div \(test_read_numbers\.py:\d+ in f"
    ):
        model.fit([(X, Y)] * 3, verbose=0)
