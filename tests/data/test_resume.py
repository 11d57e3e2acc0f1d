from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from lockstep.data.dataset import DistributedDataset, PerReplicaDataset
from lockstep.data.random_state import random_state, set_random_state
from lockstep.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

numpy = pytest.importorskip("numpy")


class Drawing(Dataset[Tensor]):
    """Ten examples, each with what it drew from four generators."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(5)

    def __getitem__(self, index: int) -> Tensor:
        own = torch.rand((), generator=self.own)
        return torch.tensor([index, torch.rand(()), own, random.random(), random.gauss(), numpy.random.normal()])

    def __len__(self) -> int:
        return 10


class Cropped(Dataset[Tensor]):
    """Ten examples that draw from torch's default generator alone."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])

    def __len__(self) -> int:
        return 10


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(()) + n for n in range(10))


def seeded() -> None:
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)


def sampler_of_its_own() -> DataLoader[Tensor]:
    data = Drawing()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(7))
    return DataLoader(data, batch_size=3, sampler=sampler)


SOURCES: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: DataLoader(Drawing(), batch_size=3, shuffle=True),
    "cropped": lambda: DataLoader(Cropped(), batch_size=3, shuffle=True),
    "weighted": lambda: DataLoader(Drawing(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "generator": lambda: DataLoader(Drawing(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "sampler": sampler_of_its_own,
    "processes": lambda: DataLoader(Drawing(), batch_size=3, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        TensorDataset(torch.arange(10)), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "persistent, read": lambda: DataLoader(
        list(range(10)), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=torch.tensor
    ),
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(10)), batch_size=3, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "list": lambda: [torch.arange(3)] * 4,
}


@pytest.mark.parametrize("consumer_draws", [False, True])
@pytest.mark.parametrize("taken", [1, 3, 4])
@pytest.mark.parametrize("name", SOURCES)
def test_what_is_passed_over_is_as_if_it_had_been_taken(split_cpu, name: str, taken: int, consumer_draws: bool):
    def rest(batches: Iterable[Any]) -> list[list[float]]:
        found = []
        for batch in batches:
            shards = batch[0] if isinstance(batch, list) else batch
            found.append(torch.cat(tuple(shards)).flatten().tolist())
            if consumer_draws:
                found[-1].append(torch.rand(()).item())
        return found

    seeded()
    data = DistributedDataset(SOURCES[name](), split_cpu(2))
    rest(data)  # the position is one in the second epoch
    begun = data.random_state()
    with closing(iter(data)) as batches:
        for _ in range(taken):
            next(batches)
            if consumer_draws:
                torch.rand(())
        callers = random_state([])["torch"]
        expected = [rest(batches), rest(data), torch.rand(()).item()]

    seeded()
    again = DistributedDataset(SOURCES[name](), split_cpu(2))
    set_random_state([], {**random_state([]), "torch": callers})
    found = [rest(again.iterate(skip=taken, random=begun)), rest(again), torch.rand(()).item()]

    assert found == expected


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_rounds_are_passed_over(split_cpu, taken: int):
    data = PerReplicaDataset(lambda _: [torch.tensor([n]) for n in range(5)], split_cpu(2))
    found = [[shard.tolist() for shard in batch] for batch in data.iterate(skip=taken)]
    assert found == [[[0], [1]], [[2], [3]], [[4], []]][taken:]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_passing_over_all_and_more_leaves_nothing(split_cpu, prefetch: int):
    data = DistributedDataset([torch.arange(2)] * 3, split_cpu(2), prefetch=prefetch)
    assert [list(data.iterate(skip=skip)) for skip in (3, 9)] == [[], []]


@pytest.mark.parametrize("skip", [-1, 1.0, True, None])
def test_a_skip_is_a_number_of_batches(split_cpu, skip: Any):
    with pytest.raises(ConfigError, match=r"skip=.* was given, expected .*at least 0"):
        DistributedDataset([torch.arange(2)], split_cpu(1)).iterate(skip=skip)


def test_a_state_of_other_data_is_refused(split_cpu):
    state = random_state(SOURCES["generator"]())
    with pytest.raises(DataError, match=r"2 generators .*now holds 0"):
        DistributedDataset([torch.arange(2)], split_cpu(1)).iterate(random=state)


def test_a_state_is_of_tensors_alone():
    state = random_state(SOURCES["sampler"]())
    assert {type(value) for value in state.values()} == {Tensor}
    assert set(state) == {"torch", "python", "python normal", "numpy", "numpy normal", "data 0", "data 1"}


def test_second_halves_of_normal_pairs_are_kept():
    random.gauss(), numpy.random.normal()
    state = random_state([])
    expected = [(random.gauss(), numpy.random.normal()) for _ in range(2)]
    random.gauss()
    set_random_state([], state)
    assert [(random.gauss(), numpy.random.normal()) for _ in range(2)] == expected
