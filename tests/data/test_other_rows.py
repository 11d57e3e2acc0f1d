"""Workers whose data has the same length and other rows are told so; rows that are drawn anew are no other rows."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler, TensorDataset

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object
from lockstep.data.dataset import DistributedDataset
from lockstep.errors import ClusterError

pytestmark = pytest.mark.workers

ROWS = 40


class Rows(Dataset[Any]):
    """``ROWS`` rows, each what ``row`` returns for its number."""

    def __init__(self, row: Callable[[int], Any]) -> None:
        self.row = row

    def __getitem__(self, index: int) -> Any:
        return self.row(index)

    def __len__(self) -> int:
        return ROWS


class Flips:
    """A transform with a generator of its own, seeded apart on each worker, that changes some rows."""

    def __init__(self, generator: Any, share: float) -> None:
        self.generator, self.share = generator, share

    def __call__(self, index: int) -> tuple[Tensor, int]:
        row = torch.full((4,), float(index))
        return (-row - 1 if self.generator.random() < self.share else row), index


class Opened(Dataset[Tensor]):
    """Opens its file where it is first read: that belongs to the process."""

    process = 0

    def __getitem__(self, index: int) -> Tensor:
        self.process = self.process or os.getpid()
        assert self.process == os.getpid()
        return torch.tensor([index])

    def __len__(self) -> int:
        return ROWS


class Backwards(Sampler[int]):
    """A sampler of the user's, which leaves out the rows that cannot be read."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS - 1, 9, -1))

    def __len__(self) -> int:
        return ROWS - 10


def from_ten_on(other: int) -> Callable[[int], Tensor]:
    def row(index: int) -> Tensor:
        if index < 10:
            raise OSError("this row has no file")
        return torch.tensor([index + other])

    return row


def noise(index: int) -> Tensor:
    return torch.randn(3) + torch.tensor(np.random.rand() + random.random())


def picture(row: int, brighter: int) -> Tensor:
    values = torch.randint(0, 250, (3, 16, 16), generator=torch.Generator().manual_seed(row))
    values[:, ::4, ::4] += brighter
    return values.to(torch.uint8)


def sources(worker: int) -> dict[str, DataLoader[Any]]:
    """By name the data of a worker."""
    numbers = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(ROWS)
    rest = SubsetRandomSampler(range(10, ROWS))
    return {
        "other numbers": DataLoader(TensorDataset(numbers + 0.1 * worker, labels), batch_size=8, shuffle=True),
        "other labels": DataLoader(TensorDataset(numbers, labels + worker), batch_size=8),
        "other words": DataLoader(Rows(lambda row: {"text": f"{row} {'ab'[worker]}", "row": row}), batch_size=8),
        "other rows in processes": DataLoader(Rows(lambda row: row + worker), batch_size=8, num_workers=2),
        "other rows of a part": DataLoader(Rows(from_ten_on(worker)), batch_size=8, sampler=rest),
        "other rows of a sampler": DataLoader(Rows(from_ten_on(worker)), batch_size=8, sampler=Backwards()),
        "the same": DataLoader(TensorDataset(numbers, labels), batch_size=8, shuffle=True),
        "the same part": DataLoader(Rows(from_ten_on(0)), batch_size=8, sampler=rest),
        "the same of a sampler": DataLoader(Rows(from_ten_on(0)), batch_size=8, sampler=Backwards()),
        "the same in processes": DataLoader(Opened(), batch_size=8, num_workers=2),
        "folders of their own": DataLoader(Rows(lambda row: (f"/data{worker}/{row}.png", row)), batch_size=8),
        "the last bits": DataLoader(TensorDataset(numbers * (1 + 1e-7 * worker), labels), batch_size=8),
        "another decoder": DataLoader(Rows(lambda row: picture(row, worker)), batch_size=8),
        "noise": DataLoader(Rows(noise), batch_size=8),
        "half flipped": DataLoader(Rows(Flips(random.Random(worker), 0.5)), batch_size=8),
        "few flipped": DataLoader(Rows(Flips(np.random.default_rng(worker), 0.1)), batch_size=8, num_workers=1),
        "all flipped but few": DataLoader(Rows(Flips(np.random.RandomState(worker), 0.9)), batch_size=8),
    }


def outcome(read: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            read()
        except ClusterError as error:
            return str(error)
    return "".join(f"warning: {each.message}" for each in caught if "rows that were compared" in str(each.message))


def job() -> dict[str, list[str]]:
    """By name of the data what each worker is told, and whether beginning leaves the dataset's generators alone."""
    worker = int(os.environ["RANK"])
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=0)
    found = {
        name: outcome(lambda loader=loader: list(strategy.distribute_dataset(loader)))
        for name, loader in sources(worker).items()
    }
    module = nn.Linear(4, 1)
    with strategy.scope():
        model = ls.Model(module)
        model.compile(optimizer=torch.optim.SGD(module.parameters(), 0.1), loss=nn.MSELoss())
        rows = TensorDataset(torch.ones(ROWS, 4) + worker, torch.ones(ROWS, 1))
        found["fit"] = outcome(lambda: model.fit(DataLoader(rows, batch_size=8), verbose=0))
    nested = Flips(np.random.RandomState(7), 0.5)
    strategy.distribute_dataset(DataLoader(Rows(nested), batch_size=8)).iterate()
    found["generator"] = str(nested.generator.random() == np.random.RandomState(7).random())
    everyones = all_gather_object(strategy.workers, "found", found)
    strategy.close()
    return {name: [each[name] for each in everyones] for name in found}


@cache
def result() -> dict[str, list[str]]:
    return ls.launch(job, workers=2, timeout_s=250)


OTHER = [name for name in sources(0) if name.startswith("other")]


@pytest.mark.parametrize("name", [*OTHER, "fit"])
def test_all_workers_are_told_of_other_rows(name: str):
    told = result()[name]
    assert all("the workers' data differ: worker 1" in each and 'shard="off"' in each for each in told), told


@pytest.mark.parametrize("name", [name for name in sources(0) if name not in (*OTHER, "another decoder")])
def test_equal_and_random_rows_are_no_other_rows(name: str):
    assert result()[name] == ["", ""]


def test_the_chief_warns_of_pictures_that_differ_a_little():
    chiefs, others = result()["another decoder"]
    assert "warning: the workers' data differ" in chiefs
    assert others == ""


def test_the_generators_of_the_data_stay_where_they_are():
    assert result()["generator"] == ["True", "True"]


def test_an_error_of_a_row_is_raised_as_it_is(split_cpu, run_workers):
    def body(workers: Any) -> None:
        loader = DataLoader(Rows(from_ten_on(0)), batch_size=8)
        DistributedDataset(loader, split_cpu(1), workers=workers).iterate()

    with pytest.raises(OSError, match="this row has no file"):
        run_workers((1, 1), body)
