"""What the data draws, and what it sees of the training, where a plain loop over a DataLoader reads in turn."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.stand_in import stand_in_gpus
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import lockstep as ls
from lockstep.data.dataset import DistributedDataset, PerReplicaDataset

Draw = Callable[[], float]


class Holder:
    """A transform that holds a generator."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng


of_the_program = np.random.default_rng(6)


def draw_of_the_program() -> float:
    return float(of_the_program.random())


def drawing_from(rng: random.Random) -> Draw:
    return lambda: rng.random()


class Augmented(Dataset[Tensor]):
    """Rows that draw a number each time they are loaded."""

    def __init__(self, kind: str) -> None:
        self.transforms = [Holder(np.random.default_rng(3)), Holder(random.Random(4))]
        self.own = torch.Generator().manual_seed(5)
        draws: dict[str, Draw] = {
            "torch": lambda: torch.rand(()).item(),
            "numpy": lambda: float(np.random.rand()),
            "python": random.random,
            "numpy of its own": lambda: float(self.transforms[0].rng.random()),
            "python of its own": lambda: float(self.transforms[1].rng.random()),
            "torch of its own": lambda: torch.rand((), generator=self.own).item(),
            "numpy of the program": draw_of_the_program,
            "python of a closure": drawing_from(random.Random(7)),
            "torch of a partial": partial(lambda rng: torch.rand((), generator=rng).item(), self.own),
        }
        self.draw = draws[kind]

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.draw()], dtype=torch.float64)

    def __len__(self) -> int:
        return 24


KINDS = (
    "torch",
    "numpy",
    "python",
    "numpy of its own",
    "python of its own",
    "torch of its own",
    "numpy of the program",
    "python of a closure",
    "torch of a partial",
)


def seeded() -> None:
    of_the_program.bit_generator.state = np.random.default_rng(6).bit_generator.state
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def loader(kind: str) -> DataLoader[Tensor]:
    return DataLoader(Augmented(kind), batch_size=4, shuffle=True)


def left_early(batches: Iterable[Any], whole: Callable[[Any], Tensor], between: Callable[[], Any]) -> list[list[Any]]:
    """Three epochs, of which two are left early, in three ways of a loop."""
    epochs = []
    for steps in (2, 1, 6):
        rows = []
        for step, batch in enumerate(batches):
            rows.append(whole(batch).tolist())
            between()
            if step + 1 == steps:
                break
        epochs.append(rows)
    return [*epochs, torch.rand(()).item(), random.random(), float(np.random.rand())]


def joined(batch: Any) -> Tensor:
    return torch.cat(list(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_left_early_is_followed_by_the_one_of_a_plain_loop(split_cpu, kind: str):
    seeded()
    expected = left_early(loader(kind), lambda batch: batch, int)
    seeded()
    found = left_early(DistributedDataset(loader(kind), split_cpu(3)), joined, int)
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_draws_between_the_batches_draws_in_turn_with_the_data(split_cpu, kind: str):
    def between() -> None:
        random.random()
        np.random.rand()
        torch.rand(2)

    seeded()
    expected = left_early(loader(kind), lambda batch: batch, between)
    seeded()
    assert left_early(DistributedDataset(loader(kind), split_cpu(3)), joined, between) == expected


def test_a_loop_that_draws_beside_data_that_does_not_is_not_warned(split_cpu):
    def plain() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=True)

    seeded()
    expected = left_early(plain(), lambda batch: batch[0], lambda: torch.rand(2))
    seeded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = DistributedDataset(plain(), split_cpu(2))
        assert left_early(data, lambda batch: joined(batch[0]), lambda: torch.rand(2)) == expected


def test_what_an_early_break_leaves_is_what_the_next_epoch_trains_on(split_cpu):
    seeded()
    expected = torch.zeros(2, dtype=torch.float64)
    for _ in range(3):
        for step, batch in enumerate(loader("torch")):
            expected += batch.mean(0)
            if step == 1:
                break
    seeded()
    total = torch.zeros(2, dtype=torch.float64)
    strategy = ls.MirroredStrategy(list(split_cpu(2)))
    for _ in range(3):
        for step, batch in enumerate(strategy.distribute_dataset(loader("torch"))):
            total += strategy.reduce("mean", batch, axis=0)
            if step == 1:
                break
    strategy.close()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


class Replay(IterableDataset[Tensor]):
    """Gives what the loop has done so far."""

    def __init__(self) -> None:
        self.steps = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(6):
            yield torch.full((2,), self.steps)


class ByState(Sampler[list[int]]):
    """Draws rows by what the loop has done so far."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield [self.replay.steps] * 2

    def __len__(self) -> int:
        return 6


class Bare:
    """An iterable of the user's own."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.replay)


SOURCES: dict[str, Callable[[Replay], Iterable[Any]]] = {
    "generator": lambda replay: (torch.full((2,), replay.steps) for _ in range(6)),
    "iterable": Bare,
    "stream": lambda replay: replay,
    "loader of a stream": lambda replay: DataLoader(replay, batch_size=None),
    "sampler": lambda replay: DataLoader(torch.arange(10), batch_sampler=ByState(replay)),  # type: ignore[arg-type]
}


def seen(batches: Iterable[Any], replay: Replay, value: Callable[[Any], float]) -> list[float]:
    found = []
    for batch in batches:
        found.append(value(batch))
        replay.steps += 1
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_data_that_looks_at_the_training_sees_what_it_sees_in_a_plain_loop(split_cpu, name: str):
    replay = Replay()
    expected = seen(SOURCES[name](replay), replay, lambda batch: batch[0].item())
    assert expected == [0, 1, 2, 3, 4, 5]
    replay = Replay()
    data = DistributedDataset(SOURCES[name](replay), split_cpu(2))
    assert seen(data, replay, lambda batch: batch[0][0].item()) == expected
    replay = Replay()
    rounds = PerReplicaDataset(lambda _: SOURCES[name](replay), split_cpu(1))
    assert seen(rounds, replay, lambda batch: batch[0][0].item()) == expected


class Seeded(list[Tensor]):
    """Batches that say that they may be read ahead."""

    may_be_read_ahead = True


IN_MEMORY: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: [torch.ones(4)] * 5,
    "rows": lambda: DataLoader(TensorDataset(torch.ones(24)), batch_size=4, shuffle=True),
    "batches that say so": lambda: Seeded([torch.ones(4)] * 5),
    "a dataset of the program's": lambda: loader("torch"),
    "a stream that looks at the training": lambda: Replay(),
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_what_is_in_memory_is_read_ahead_for_gpus_alone(split_cpu, name: str):
    def reads_ahead(devices: Any) -> bool:
        with closing(iter(DistributedDataset(IN_MEMORY[name](), devices))) as batches:
            next(batches)
            return any(thread.name.startswith("lockstep-prefetch") for thread in threading.enumerate())

    assert not reads_ahead(split_cpu(2))
    with stand_in_gpus() as (devices, _):
        assert reads_ahead(devices) == (name in ("list", "rows", "batches that say so"))


class Curriculum(Dataset[Tensor]):
    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.replay.steps)

    def __len__(self) -> int:
        return 12


def test_prefetch_0_reads_nothing_ahead_and_is_public(split_cpu):
    replay = Replay()
    expected = seen(DataLoader(Curriculum(replay), batch_size=2), replay, lambda batch: batch[0].item())
    strategy = ls.MirroredStrategy(list(split_cpu(2)))
    replay = Replay()
    data = DataLoader(Curriculum(replay), batch_size=2)
    assert seen(strategy.distribute_dataset(data, prefetch=0), replay, lambda batch: batch[0][0].item()) == expected
    replay = Replay()
    rounds = strategy.distribute_datasets_from_function(lambda _: DataLoader(Curriculum(replay)), prefetch=0)
    assert seen(rounds, replay, lambda batch: batch[0][0].item()) == expected
    with pytest.raises(ls.errors.ConfigError, match="prefetch"):
        strategy.distribute_dataset([], prefetch=-1)
    strategy.close()


def test_a_generator_is_read_ahead_when_told(split_cpu):
    replay = Replay()
    data = DistributedDataset(SOURCES["generator"](replay), split_cpu(2), prefetch=2)
    assert seen(data, replay, lambda batch: batch[0][0].item()) != [0, 1, 2, 3, 4, 5]
