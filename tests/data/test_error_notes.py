"""An error about shapes that a shard alone meets says how many rows of the batch the shard has, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lockstep as ls

X, Y = torch.arange(55.0).reshape(11, 5).sin(), (torch.arange(11) % 2).float()
BATCHES = [(X[:9], Y[:9]), (X[9:], Y[9:])]


class Squeezed(nn.Linear):
    """A head of one output for each row; a lone row loses its dim 0."""

    def __init__(self) -> None:
        super().__init__(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


def notes(call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...]) -> str:
    with pytest.raises(error) as caught:
        call()
    return "\n".join(caught.value.__notes__)


def run(strategy: ls.Strategy, step: Callable[..., Any], batches: list[Any]) -> None:
    for batch in strategy.distribute_dataset(batches):
        strategy.run(step, batch)


def test_a_lone_row_without_its_dimension(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Squeezed())

    def step(x: Tensor, y: Tensor) -> None:
        F.binary_cross_entropy_with_logits(mirrored(x), y, reduction="none")

    told = notes(lambda: run(strategy, step, BATCHES), ValueError)
    assert "has 1 of the 2 rows of the batch" in told
    assert "squeeze(1)" in told


def test_a_loss_of_a_lone_row_that_is_a_scalar(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Squeezed())

    def step(x: Tensor, y: Tensor) -> None:
        ls.compute_average_loss(mirrored(x).square(), global_batch_size=2)

    told = notes(lambda: run(strategy, step, BATCHES), ls.errors.ConfigError)
    assert "has 1 of the 2 rows of the batch" in told
    assert "squeeze(1)" in told


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_fit_says_it_too(make_strategy: MakeStrategy, method: str):
    with make_strategy(2).scope():
        module = Squeezed()
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 0.1), nn.BCEWithLogitsLoss())
    told = notes(lambda: getattr(model, method)(BATCHES, verbose=0), ValueError)
    assert "has 1 of the 2 rows of the batch" in told


def test_a_size_of_the_whole_batch(make_strategy: MakeStrategy):
    told = notes(lambda: run(make_strategy(2), lambda x, y: x.view(9, 5), BATCHES), RuntimeError)
    assert re.search("has [45] of the 9 rows of the batch", told)
    assert ".view(9, ...)" in told
    assert "squeeze" not in told
    assert "\n" not in told  # one note


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (lambda x, y: x.view(45), ".view(9, ...)"),
        (lambda x, y: x + torch.zeros(9, 5), ".view(9, ...)"),
        (lambda x, y: x.view(-1, 3, 5), "groups of rows"),
        (lambda x, y: x[0::2] - x[1::2], "groups of rows"),
        (lambda x, y: x.view(9, 7), None),
        (lambda x, y: F.linear(x, torch.zeros(1, 9)), None),
        (lambda x, y: x - torch.zeros(3), None),
        (lambda x, y: x[:, 7], None),
    ],
)
def test_the_advice_is_for_mistakes_that_the_size_of_a_shard_makes(
    make_strategy: MakeStrategy, step: Callable[[Tensor, Tensor], Tensor], advice: str | None
):
    told = notes(lambda: run(make_strategy(2), step, BATCHES), (RuntimeError, IndexError))
    assert re.search("^raised in replica [01] .*, which has [45] of the 9 rows of the batch", told)
    assert (advice in told) if advice else told.endswith("rows of the batch")


def test_a_shorter_longest_row(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.LSTM(3, 4, batch_first=True))

    def step(x: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(mirrored(packed)[0], batch_first=True)
        return outputs - target

    batch = (torch.zeros(4, 7, 3), torch.tensor([7, 6, 3, 2]), torch.zeros(4, 7, 4))
    told = notes(lambda: run(strategy, step, [batch]), RuntimeError)
    assert "has 2 of the 4 rows of the batch" in told
    assert "total_length=" in told


def test_other_errors_and_other_batches_have_no_such_note(make_strategy: MakeStrategy):
    def other(x: Tensor, y: Tensor) -> None:
        raise KeyError("size")

    def alone(x: Tensor) -> Tensor:
        return x.view(2, 2)

    assert "of the batch" not in notes(lambda: run(make_strategy(2), other, BATCHES), KeyError)
    assert "of the batch" not in notes(lambda: make_strategy(2).run(alone, (X,)), RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        run(make_strategy(1), lambda x, y: x.view(2, 2), BATCHES)
    assert not any("of the batch" in note for note in getattr(caught.value, "__notes__", ()))
