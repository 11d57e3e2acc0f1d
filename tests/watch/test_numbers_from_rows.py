"""Numbers that a step reads from a shard by Python or NumPy, and computes its loss with, are told of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
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


def rewards_less_their_mean(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rewards = x[:, 0]  # no gradient is in them
    advantages = rewards - rewards.mean().item()
    return average(-module(x).squeeze(1) * advantages)


def weights_written_in_place(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.ones(2)
    weight[:] = torch.as_tensor(np.bincount(y.long().squeeze(1).numpy(), minlength=2) / len(y))
    logits = module(x)
    labels = y.long().squeeze(1)
    return average(F.cross_entropy(torch.cat([-logits, logits], 1), labels, weight=weight, reduction="none"))


def weights_filled_out_of_place(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.ones_like(y).masked_fill(y == 1, float(1 - y.mean()))
    return average((squares(module, x, y).unsqueeze(1) * weight).squeeze(1))


def divided_twice(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (squares(module, x, y) * y.squeeze(1)).sum() / int(y.sum()) / 2


def means_of_each_text(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    lengths = (2 + 2 * y.squeeze(1).long()).tolist()  # 4 or 2 words a text
    words = torch.cat([row.repeat(length, 1) for row, length in zip(x, lengths, strict=True)])
    texts = [text.sum(0) / len(text) for text in module(words).split(lengths)]
    return average(torch.stack(texts).square().squeeze(1))


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
        (rewards_less_their_mean, "sub", ()),
        (weights_written_in_place, "setitem", ("0.4", "0.8")),
        (weights_filled_out_of_place, "masked_fill", ("0.4", "0.8")),
        (divided_twice, "div", ("3", "1")),
    ],
)
def test_a_number_of_each_shard_is_told_of_once_with_its_line(
    make_strategy: MakeStrategy, loss_of: LossOfStep, call: str, numbers: tuple[str, ...]
) -> None:
    (message,) = [message for message in warnings_of(make_strategy, loss_of) if "has read numbers" in message]
    assert f"{call} (test_numbers_from_rows.py:" in message
    assert f" in {loss_of.__name__})" in message
    assert all(f" {number} in " in message for number in numbers)
    assert "all_reduce" in message


@pytest.mark.parametrize(
    "loss_of", [logged, average_for_the_log, share_of_the_batch, labels_by_a_list, count_of_all, means_of_each_text]
)
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


class Centred(nn.Module):
    """Subtracts an average over earlier steps, which it keeps as an attribute and not as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(8, 1), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x - self.average)
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return outputs


class Logging(nn.Module):
    """Keeps what is only shown."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(8, 1), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * outputs.detach().mean()
        return outputs


@pytest.mark.parametrize(("kind", "is_told"), [(Centred, True), (Logging, False)])
def test_what_a_module_keeps_from_step_to_step_is_told_of_where_it_is_used(
    make_strategy: MakeStrategy, kind: type[nn.Module], is_told: bool
) -> None:
    with make_strategy(2).scope():
        module = kind()
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=0.1), nn.MSELoss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit([(X, Y)] * 3, verbose=0)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == is_told
    assert all("computes with 'average' of Centred, kept from an earlier step" in message for message in messages)


def count_in_the_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y).square() * y).sum() / max(1.0, float(y.sum()))


def test_the_counts_of_a_loss_that_fit_divides_by_are_not_told_of(make_strategy: MakeStrategy) -> None:
    with make_strategy(2).scope():
        module = nn.Linear(8, 1)
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=0.1), count_in_the_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit([(X, Y)] * 3, verbose=0)


def test_fit_tells_of_a_number_that_its_model_reads(make_strategy: MakeStrategy) -> None:
    with make_strategy(2).scope():
        module = Scaled()
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=0.1), nn.MSELoss())
    with pytest.warns(
        UserWarning, match=r"the model or its loss has read numbers .* div \(test_numbers_from_rows\.py:\d+ in f"
    ):
        model.fit([(X, Y)] * 3, verbose=0)


def checked(outputs: Tensor, y: Tensor) -> Tensor:
    losses = (outputs - y).square()
    if not math.isfinite(float(losses.detach().mean())):
        raise ValueError("the loss is not finite")
    return losses


@pytest.mark.parametrize("loss", [nn.MSELoss(), checked], ids=["fit reads the losses", "the loss reads a number"])
def test_buffers_that_a_backup_has_read_through_numpy_are_not_told_of(
    make_strategy: MakeStrategy, tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    with make_strategy(2).scope():
        model = ls.Model(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    model.compile("adamw", loss)
    backup = ls.BackupAndRestore(tmp_path, save_freq=1, delete_checkpoint=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit([(X[:4], Y[:4]), (X[4:8], Y[4:8])] * 3, epochs=3, callbacks=[backup], verbose=0)
