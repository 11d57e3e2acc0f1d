"""The loader over a worker's own part of the data: the same in all but what it loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from lockstep.collectives.communicator import Communicator
from lockstep.data.sources import shard_files
from lockstep.errors import DataError

if TYPE_CHECKING:
    from tests.data.conftest import RunWorkers


class Rows(Dataset[int]):
    """Rows that can be divided, as those of a Hugging Face data set."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def shard(self, num_shards: int, index: int) -> Rows:
        return Rows(self.rows[index::num_shards])

    def __getitem__(self, index: int) -> int:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


class Lines(IterableDataset[int]):
    def shard(self, num_shards: int, index: int) -> Lines:
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class OtherLoader(DataLoader[Any]):
    pass


class OtherBatches(BatchSampler):
    pass


SETTINGS: dict[str, Any] = {
    "batch_size": 3,
    "num_workers": 2,
    "collate_fn": list,
    "pin_memory": False,
    "drop_last": True,
    "timeout": 7.0,
    "worker_init_fn": print,
    "generator": torch.Generator(),
    "prefetch_factor": 5,
    "persistent_workers": True,
    "in_order": False,
}


def of_worker_1(run_workers: RunWorkers, loader: DataLoader[Any]) -> DataLoader[Any]:
    def own(workers: Communicator) -> Any:
        return shard_files(loader, workers)

    return run_workers((1, 1), own)[1]


def test_it_has_the_settings_of_the_whole_one(run_workers: RunWorkers):
    own = of_worker_1(run_workers, DataLoader(Rows(list(range(9))), **SETTINGS, multiprocessing_context="spawn"))

    assert {name: getattr(own, name) for name in SETTINGS} == SETTINGS
    assert own.multiprocessing_context.get_start_method() == "spawn"
    assert own.dataset.rows == [1, 3, 5, 7]


def test_it_goes_through_its_part_in_the_same_kind_of_order(run_workers: RunWorkers):
    generator = torch.Generator()
    plain = of_worker_1(run_workers, DataLoader(Rows(list(range(9)))))
    shuffled = of_worker_1(run_workers, DataLoader(Rows(list(range(9))), shuffle=True, generator=generator))

    assert type(plain.sampler) is SequentialSampler
    assert type(shuffled.sampler) is RandomSampler
    assert shuffled.sampler.generator is generator
    assert (len(plain.sampler), len(shuffled.sampler)) == (4, 4)


def test_a_stream_keeps_its_own_order(run_workers: RunWorkers):
    own = of_worker_1(run_workers, DataLoader(Lines(), batch_size=4, drop_last=True))

    assert (own.batch_size, own.drop_last) == (4, True)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (OtherLoader(Rows([0, 1])), "OtherLoader is a subclass of DataLoader"),
        (DataLoader(Rows([0, 1]), batch_sampler=OtherBatches([0, 1], 1, False)), "its DataLoader has a OtherBatches"),
        (
            DataLoader(Rows([0, 1]), sampler=RandomSampler(Rows([0, 1]), num_samples=1)),
            "its DataLoader has a RandomSampler",
        ),
    ],
)
def test_what_is_about_the_whole_data_is_refused(run_workers: RunWorkers, loader: DataLoader[Any], reason: str):
    with pytest.raises(DataError, match=reason):
        of_worker_1(run_workers, loader)
