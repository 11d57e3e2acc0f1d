from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from lockstep.errors import ConfigError, DataError
from lockstep.strategies.base import Strategy
from lockstep.train.feed import Feed, distribute

if TYPE_CHECKING:
    from tests.train.conftest import MakeStrategy


class Numbers:
    """Batches 0, 1, 2; remembers which epochs it was told of and how often it was begun."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.begun = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        yield from (torch.full((2,), n) for n in range(3))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.fixture
def strategy(make_strategy: MakeStrategy) -> Strategy:
    return make_strategy(2)


def read(feed: Feed, epoch: int) -> list[int]:
    return [int(batch[0][0]) for batch in feed.epoch(epoch)]


def test_an_epoch_is_one_iteration_of_data_that_knows_its_epoch(strategy: Strategy):
    numbers = Numbers()
    feed = Feed(distribute(strategy, numbers), name="the data")

    assert [read(feed, epoch) for epoch in (0, 5)] == [[0, 1, 2], [0, 1, 2]]
    assert numbers.epochs == [0, 5]
    assert feed.steps is None


def test_the_length_is_that_of_the_data_or_the_number_of_steps(strategy: Strategy):
    data = distribute(strategy, [torch.zeros(2)] * 4)

    assert Feed(data, name="the data").steps == 4
    assert Feed(data, name="the data", steps_per_epoch=9).steps == 9


def test_a_number_of_steps_goes_on_and_begins_anew(strategy: Strategy):
    numbers = Numbers()
    feed = Feed(distribute(strategy, numbers), name="the data", steps_per_epoch=2)

    assert [read(feed, epoch) for epoch in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert numbers.begun == 2
    feed.close()


def test_closing_ends_the_reading_ahead(strategy: Strategy):
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(2)

    feed = Feed(distribute(strategy, endless()), name="the data", steps_per_epoch=2)
    read(feed, 0)

    feed.close()  # a thread that goes on would fail this test


@pytest.mark.parametrize("steps", [None, 2])
def test_no_batches_is_one_line(strategy: Strategy, steps: int | None):
    feed = Feed(distribute(strategy, []), name="the training data", steps_per_epoch=steps)

    with pytest.raises(DataError, match="the training data gave no batches; give a DataLoader or a list"):
        read(feed, 0)


def test_a_generator_that_ends_within_the_steps_is_named(strategy: Strategy):
    feed = Feed(distribute(strategy, (torch.zeros(2) for _ in range(3))), name="the data", steps_per_epoch=2)
    read(feed, 0)

    with pytest.raises(DataError, match="the data gave no batches for epoch 2: a generator can be read only once"):
        read(feed, 1)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(strategy: Strategy, steps: int):
    with pytest.raises(ConfigError, match=r"steps_per_epoch=.*; give a number of global batches, or None"):
        Feed(distribute(strategy, []), name="the data", steps_per_epoch=steps)
