"""Workers that share their data get, all together, exactly what one worker with as many replicas gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.collectives.workers import Workers
from lockstep.config import LogicalDevice
from lockstep.data.distributed import DistributedDataset

if TYPE_CHECKING:
    from tests.data.conftest import RunWorkers

LAYOUTS = [(1, 1), (2, 1), (1, 2, 1), (1, 1, 1)]


class Logged(Dataset[Tensor]):
    """Numbers, that notes which were loaded."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([index, 10 * index])

    def __len__(self) -> int:
        return self.rows


class Stream(IterableDataset[Tensor]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        return (
            torch.tensor(n) for n in range(0 if info is None else info.id, self.rows, info.num_workers if info else 1)
        )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def structured(rows: list[Tensor]) -> dict[str, Any]:
    return {"ids": torch.stack(rows), "mean": (torch.stack(rows).float(), "name")}


SOURCES: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: list(torch.arange(14).split(5)),
    "empty batch": lambda: [torch.arange(3), torch.arange(0), torch.arange(2)],
    "in order": lambda: DataLoader(Logged(14), batch_size=5),
    "shuffled": lambda: DataLoader(Logged(14), batch_size=5, shuffle=True, generator=generator()),
    "drop_last": lambda: DataLoader(Logged(14), batch_size=5, drop_last=True),
    "one row": lambda: DataLoader(Logged(3)),
    "collate_fn": lambda: DataLoader(Logged(14), batch_size=5, collate_fn=structured),
    "batch_sampler": lambda: DataLoader(
        Logged(14), batch_sampler=BatchSampler(RandomSampler(range(14), generator=generator()), 4, True)
    ),
    "lists of indices": lambda: DataLoader(Logged(14), batch_sampler=[(1, 2, 3), [5], torch.tensor([4, 6])]),
    "weighted": lambda: DataLoader(
        Logged(14), batch_size=5, sampler=WeightedRandomSampler([1.0] * 14, 9, generator=generator())
    ),
    "no batch_size": lambda: DataLoader(
        TensorDataset(torch.arange(14)), batch_size=None, sampler=BatchSampler(SequentialSampler(range(14)), 5, False)
    ),
    "stream": lambda: DataLoader(Stream(14), batch_size=5),
}

# Slow to start: only where said.
IN_PROCESSES: dict[str, Callable[[], Iterable[Any]]] = {
    "processes": lambda: DataLoader(Logged(14), batch_size=5, shuffle=True, generator=generator(), num_workers=2),
}


def seen(dataset: Iterable[Any]) -> list[list[Any]]:
    """Per batch and local replica: everything."""
    found = []
    for batch in dataset:
        leaves = batch if not isinstance(batch, (tuple, list)) else batch[0]
        if isinstance(batch, dict):
            ids, (mean, name) = batch["ids"], batch["mean"]
            found.append([[i.tolist(), m.tolist(), n] for i, m, n in zip(ids, mean, name, strict=True)])
        else:
            found.append([shard.tolist() for shard in leaves])
    return found


def in_one(found: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """The workers' replicas in a row, batch after batch."""
    return [[shard for worker in workers for shard in worker] for workers in zip(*found, strict=True)]


@pytest.mark.parametrize(("name", "layout"), [*itertools.product(SOURCES, LAYOUTS), ("processes", (2, 1))])
def test_all_workers_get_what_one_gets(split_cpu, run_workers: RunWorkers, name: str, layout: tuple[int, ...]):
    make = {**SOURCES, **IN_PROCESSES}[name]
    devices = split_cpu(4)
    one = DistributedDataset(make(), devices[: sum(layout)])
    expected = [seen(one) for _ in range(2)]

    def body(workers: Workers) -> list[Any]:
        data = DistributedDataset(make(), devices[: layout[workers.index]], workers=workers)
        return [seen(data) for _ in range(2)]

    found = run_workers(layout, body)

    assert [in_one([worker[epoch] for worker in found]) for epoch in range(2)] == expected


def by_hand(
    workers: Workers, source: Iterable[Any], devices: Sequence[LogicalDevice], **settings: Any
) -> DistributedDataset:
    return DistributedDataset(source, devices[: workers.replicas[workers.index]], workers=workers, **settings)


def test_batches_cut_by_hand(split_cpu, run_workers: RunWorkers):
    source, devices = [torch.arange(7), torch.arange(2)], split_cpu(2)

    found = run_workers((2, 1), lambda workers: seen(by_hand(workers, source, devices)))

    assert found == [[[[0, 1, 2], [3, 4, 5]], [[0], [1]]], [[[6]], [[]]]]


def test_only_the_own_rows_are_loaded(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)

    def body(workers: Workers) -> list[int]:
        data = Logged(8)
        seen(by_hand(workers, DataLoader(data, batch_size=6), devices))
        return data.loaded

    # The third worker has no row of the last batch, and loads one for its structure.
    assert run_workers((1, 1, 1), body) == [[0, 1, 6], [2, 3, 7], [4, 5, 6]]
