"""Communicator that share their data get, all together, exactly what one worker with as many replicas gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.data.conftest import LIMIT_S, RunWorkers
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.collectives.communicator import Communicator
from lockstep.config import LogicalDevice
from lockstep.data.dataset import DistributedDataset
from lockstep.data.worker_sync import start_together
from lockstep.errors import ClusterError, CollectiveError, DataError

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

# Slow to start: only where said. With a limit, because a fork of a process with threads may hang on a lock that another
# thread held at the fork; a worker that hangs is alive, and a DataLoader waits for that without end.
IN_PROCESSES: dict[str, Callable[[], Iterable[Any]]] = {
    "processes": lambda: DataLoader(
        Logged(14), batch_size=5, shuffle=True, generator=generator(), num_workers=2, timeout=LIMIT_S
    ),
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

    def body(workers: Communicator) -> list[Any]:
        data = DistributedDataset(make(), devices[: layout[workers.index]], workers=workers)
        return [seen(data) for _ in range(2)]

    found = run_workers(layout, body)

    assert [in_one([worker[epoch] for worker in found]) for epoch in range(2)] == expected


def by_hand(
    workers: Communicator, source: Iterable[Any], devices: Sequence[LogicalDevice], **settings: Any
) -> DistributedDataset:
    return DistributedDataset(source, devices[: workers.replicas[workers.index]], workers=workers, **settings)


def test_batches_cut_by_hand(split_cpu, run_workers: RunWorkers):
    source, devices = [torch.arange(7), torch.arange(2)], split_cpu(2)
    found = run_workers((2, 1), lambda workers: seen(by_hand(workers, source, devices)))
    assert found == [[[[0, 1, 2], [3, 4]], [[0], [1]]], [[[5, 6]], [[]]]]


def test_only_the_own_rows_are_loaded(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)

    def body(workers: Communicator) -> list[int]:
        data = Logged(8)
        distributed = by_hand(workers, DataLoader(data, batch_size=6), devices)
        seen(distributed)  # the first iteration also loads the few rows that the workers compare
        data.loaded.clear()
        seen(distributed)
        return data.loaded

    # The third worker has no row of the last batch, and loads one for its structure.
    assert run_workers((1, 1, 1), body) == [[0, 1, 6], [2, 3, 7], [4, 5, 6]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda index: [torch.arange(2)] * (4 if index == 1 else 3), r"worker 1 has 4 .*worker 0 has 3"),
        (
            lambda index: DataLoader(Logged(8 - index % 2), batch_size=4),
            "worker 1 has 7 examples, worker 0 has 8",
        ),
    ],
)
def test_a_length_that_differs_is_named_at_the_beginning(split_cpu, run_workers: RunWorkers, make: Any, message: str):
    devices = split_cpu(1)
    with pytest.raises(ClusterError, match=message):
        run_workers((1, 1, 1), lambda workers: by_hand(workers, make(workers.index), devices).iterate())


def test_an_end_that_comes_early_is_named(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> None:
        list(by_hand(workers, (torch.arange(2) for _ in range(3 + workers.index)), devices))

    ends = (
        "worker 0 is at 'the end of the data, after 3 global batches'.*worker 1 is at 'the end of the data, after 4 gl"
    )
    with pytest.raises(CollectiveError, match=ends):
        run_workers((1, 1), body)


@pytest.mark.parametrize("kind", ["indices", "batches"])
def test_another_order_is_found_at_the_next_exchange(split_cpu, run_workers: RunWorkers, kind: str):
    devices, orders = split_cpu(1), [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3, 2]]

    def body(workers: Communicator) -> int:
        order = orders[workers.index]
        whole = TensorDataset(torch.arange(4))
        source = (
            DataLoader(whole, batch_size=2, sampler=order) if kind == "indices" else list(torch.tensor(order).split(2))
        )
        for step, _ in enumerate(by_hand(workers, source, devices)):
            workers.all_gather_numbers(f"step {step}")
        return 0

    with pytest.raises(CollectiveError, match=r"worker 2 was handed other data.* before 'step 1'"):
        run_workers((1, 1, 1), body)


def test_a_part_that_was_taken_already_is_refused(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> None:
        sampler = DistributedSampler(Logged(8), num_replicas=2, rank=workers.index)
        by_hand(workers, DataLoader(Logged(8), sampler=sampler), devices)

    with pytest.raises(DataError, match="with a DistributedSampler, which takes one worker's part of the data already"):
        run_workers((1, 1), body)


def test_no_batch_costs_an_exchange_of_its_own(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> list[str]:
        list(by_hand(workers, DataLoader(Logged(64)), devices))
        return workers.group.calls

    assert run_workers((1, 1), body)[0] == [
        "the beginning of an iteration over the data",
        "the beginning of an iteration over the data: the chief's generators",
        "a few rows of the data",
        "the end of the data, after 64 global batches",
    ]


@pytest.mark.parametrize("skip", [1, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_every_worker_passes_over_the_same(split_cpu, run_workers: RunWorkers, name: str, skip: int):
    devices = split_cpu(2)

    def body(workers: Communicator) -> tuple[Any, Any]:
        data = by_hand(workers, SOURCES[name](), devices)
        begun = data.random_state()
        return seen(data), seen(data.iterate(skip=skip, random=begun))

    for whole, rest in run_workers((2, 1), body):
        assert rest == whole[skip:]


def test_a_collate_fn_that_makes_other_numbers_of_rows_loses_none(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)

    def doubled(rows: list[Tensor]) -> Tensor:
        return torch.cat([torch.stack(rows)[:, 0]] * 2)

    def body(workers: Communicator) -> list[Any]:
        return seen(by_hand(workers, DataLoader(Logged(5), batch_size=4, collate_fn=doubled), devices))

    batches = in_one(run_workers((2, 1), body))
    assert [sorted(row for shard in batch for row in shard) for batch in batches] == [[0, 0, 1, 1, 2, 2, 3, 3], [4, 4]]


def drawn_after(workers: Communicator, generators: int) -> list[int]:
    """What generators draw that every worker seeded in its own way."""
    local = [torch.Generator().manual_seed(10 * workers.index + number) for number in range(generators)]
    start_together(workers, [torch.zeros(2)], local)
    return [int(torch.randint(2**31, (), generator=generator)) for generator in local]


def test_all_generators_go_on_from_where_the_chief_s_stand(run_workers: RunWorkers):
    expected = [int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(seed))) for seed in (0, 1)]
    assert run_workers((1, 2, 1), drawn_after, 2) == [expected] * 3


def test_a_worker_with_other_generators_is_named(run_workers: RunWorkers):
    with pytest.raises(ClusterError, match=r"worker 1 has 1 torch\.Generators, worker 0 has 0"):
        run_workers((1, 1), lambda workers: drawn_after(workers, workers.index))
