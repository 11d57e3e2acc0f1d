from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from tests.train.conftest import MakeStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.strategies.base import Strategy
from lockstep.train.epoch_iterator import EpochIterator, distribute


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


def read(feed: EpochIterator, epoch: int) -> list[int]:
    return [int(batch[0][0]) for batch in feed.epoch(epoch)]


def test_an_epoch_is_one_iteration_of_data_that_knows_its_epoch(strategy: Strategy):
    numbers = Numbers()
    feed = EpochIterator(distribute(strategy, numbers), name="the data")
    assert [read(feed, epoch) for epoch in (0, 5)] == [[0, 1, 2], [0, 1, 2]]
    assert numbers.epochs == [0, 5]
    assert feed.steps is None


def test_the_length_is_that_of_the_data_or_the_number_of_steps(strategy: Strategy):
    data = distribute(strategy, [torch.zeros(2)] * 4)
    assert EpochIterator(data, name="the data").steps == 4
    assert EpochIterator(data, name="the data", steps_per_epoch=9).steps == 9


def test_a_number_of_steps_goes_on_and_begins_anew(strategy: Strategy):
    numbers = Numbers()
    feed = EpochIterator(distribute(strategy, numbers), name="the data", steps_per_epoch=2)
    assert [read(feed, epoch) for epoch in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert numbers.begun == 2
    feed.close()


def test_closing_ends_the_reading_ahead(strategy: Strategy):
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(2)

    feed = EpochIterator(distribute(strategy, endless()), name="the data", steps_per_epoch=2)
    read(feed, 0)

    feed.close()  # a thread that goes on would fail this test


@pytest.mark.parametrize("steps", [None, 2])
def test_no_batches_is_one_line(strategy: Strategy, steps: int | None):
    feed = EpochIterator(distribute(strategy, []), name="the training data", steps_per_epoch=steps)
    with pytest.raises(DataError, match="the training data gave no batches; give a DataLoader or a list"):
        read(feed, 0)


def test_a_generator_that_ends_within_the_steps_is_named(strategy: Strategy):
    feed = EpochIterator(distribute(strategy, (torch.zeros(2) for _ in range(3))), name="the data", steps_per_epoch=2)
    read(feed, 0)
    with pytest.raises(DataError, match=r"the data .*epoch 2.*generator"):
        read(feed, 1)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(strategy: Strategy, steps: int):
    with pytest.raises(ConfigError, match=r"steps_per_epoch=.* was given, expected .*at least 1"):
        EpochIterator(distribute(strategy, []), name="the data", steps_per_epoch=steps)


def drawing(strategy: Strategy) -> DistributedIterable:
    """Seven batches in a drawn order; the consumer below draws too."""
    generator = torch.Generator().manual_seed(3)
    return distribute(strategy, DataLoader(range(14), batch_size=2, shuffle=True, generator=generator))  # type: ignore[arg-type]


def taken(batches: Iterable[Any], most: int = 99) -> list[Any]:
    return [[torch.cat(tuple(batch)).tolist(), torch.rand(()).item()] for batch in islice(batches, most)]


@pytest.mark.parametrize("steps", [None, 3, 9])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_saved_place_is_gone_on_from(strategy: Strategy, steps: int | None, stop: int):
    torch.manual_seed(1)
    feed = EpochIterator(drawing(strategy), name="the data", steps_per_epoch=steps)
    taken(feed.epoch(0))
    with closing(feed.epoch(1)) as epoch:
        taken(epoch, stop)
        saved, caller = feed.state_dict(), torch.get_rng_state()
        expected = [*taken(epoch), *taken(feed.epoch(2))]
    feed.close()

    again = EpochIterator(drawing(strategy), name="the data", steps_per_epoch=steps)
    again.load_state_dict(saved)
    torch.set_rng_state(caller)
    with closing(again.epoch(1, skip=stop)) as epoch:
        once = taken(epoch, 1)
        if once:
            twice = again.state_dict()
            others = {"random": 0, "attributes": 0}
            assert {**twice, **others} == {**saved, **others, "passed": saved["passed"] + 1}
        found = [*once, *taken(epoch), *taken(again.epoch(2))]
    again.close()

    assert found == expected


@pytest.mark.parametrize("steps", [None, 7])
def test_a_place_between_epochs_leaves_the_callers_generator_alone(strategy: Strategy, steps: int | None):
    feed = EpochIterator(drawing(strategy), name="the data", steps_per_epoch=steps)
    taken(feed.epoch(0))
    if steps:
        feed.close()
    saved, caller = feed.state_dict(), torch.get_rng_state()
    expected = taken(feed.epoch(1))
    feed.close()

    again = EpochIterator(drawing(strategy), name="the data", steps_per_epoch=steps)
    again.load_state_dict(saved)
    torch.set_rng_state(caller)
    assert (saved["passed"], saved["epoch"]) == (0, -1)
    assert taken(again.epoch(1)) == expected
    again.close()


def test_a_skip_without_a_saved_place_passes_over(strategy: Strategy):
    for steps, expected in ((None, [2]), (2, []), (5, [2, 0, 1])):
        feed = EpochIterator(distribute(strategy, Numbers()), name="the data", steps_per_epoch=steps)
        assert [int(batch[0][0]) for batch in feed.epoch(0, skip=2)] == expected
        feed.close()


def test_the_epoch_of_a_place_is_told_to_the_data(strategy: Strategy):
    numbers = Numbers()
    feed = EpochIterator(distribute(strategy, numbers), name="the data", steps_per_epoch=2)
    feed.load_state_dict({"passed": 1, "epoch": 4, "random": feed.state_dict()["random"]})
    assert [int(batch[0][0]) for batch in feed.epoch(5, skip=1)] == [1]
    assert numbers.epochs == [4]
    feed.close()


def test_another_place_than_the_saved_one_is_refused(strategy: Strategy):
    feed = EpochIterator(distribute(strategy, Numbers()), name="the training data")
    feed.load_state_dict({"passed": 1, "epoch": 4, "random": {}})
    message = "position of the training data is epoch 5, batch 1, not epoch 5, batch 2"
    with pytest.raises(CheckpointError, match=message):
        next(feed.epoch(4, skip=2))


class Telling(Numbers):
    """Numbers that tell their state; remembers which batches were made."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.made = 0, list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        start, self.place = self.place, 0
        for n in range(start, 3):
            self.made.append(n)
            self.place = n + 1
            yield torch.full((2,), n)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_steps_over_data_that_tells_its_state_go_on_at_the_very_batch(strategy: Strategy):
    feed = EpochIterator(distribute(strategy, Telling()), name="the data", steps_per_epoch=4)
    assert read(feed, 0) == [0, 1, 2, 0]
    with closing(feed.epoch(1)) as batches:
        next(batches)
        state = feed.state_dict()
    feed.close()
    source = Telling()
    resumed = EpochIterator(distribute(strategy, source), name="the data", steps_per_epoch=4)
    resumed.load_state_dict(state)

    assert [int(batch[0][0]) for batch in resumed.epoch(1, skip=1)] == [2, 0, 1]
    assert source.made == [2, 0, 1]
    assert source.epochs == [0, 1]
    resumed.close()
