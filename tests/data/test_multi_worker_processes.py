"""What only processes of their own can show: random numbers of their own, and processes that load for them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object

pytestmark = pytest.mark.workers

REPLICAS = (2, 1)
SEEDS = (5, 7)


class Drawing(Dataset[Tensor]):
    """Ten examples, each with a number drawn for it."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])

    def __len__(self) -> int:
        return 10


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.stack([torch.tensor(float(n)), torch.rand(())]) for n in torch.randperm(10))


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=3, **settings)


def local(dataset: Iterable[Any]) -> list[list[Any]]:
    """Batch after batch, each local replica's shard."""
    return [[shard.tolist() for shard in (batch[0] if isinstance(batch, list) else batch)] for batch in dataset]


def in_one(found: Any) -> Any:
    return [[shard for worker in batch for shard in worker] for batch in zip(*found, strict=True)]


def sources() -> dict[str, DataLoader[Any]]:
    numbers = TensorDataset(torch.arange(10))
    return {
        "shuffled": loader(numbers, shuffle=True),
        "persistent": loader(numbers, shuffle=True, num_workers=2, persistent_workers=True),
        "stream": loader(Stream()),
        "drawing": loader(Drawing(), shuffle=True),
    }


def job() -> dict[str, Any]:
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * max(REPLICAS))
    index = int(os.environ["RANK"])
    devices = [f"cpu:{n}" for n in range(REPLICAS[index])]
    options = ls.CommunicationOptions(lost_after_s=60)
    strategy = ls.MultiWorkerMirroredStrategy(devices, communication=options)
    found: dict[str, Any] = {}
    for name, source in sources().items():
        torch.manual_seed(SEEDS[index])
        random.seed(index)
        data = strategy.distribute_dataset(source)
        found[name] = [local(data) for _ in range(2)]
        found[f"{name}: drawn after"] = torch.rand(()).item()
        found[f"{name}: gone on"] = gone_on(data)
    everyones = all_gather_object(strategy.workers, "found", found)
    strategy.close()
    return {name: [worker[name] for worker in everyones] for name in found}


def gone_on(data: Any) -> tuple[Any, Any]:
    """The rest of an iteration that was taken from its second batch on, and of one that passed over two."""
    begun = data.random_state()
    batches = iter(data)
    next(batches), next(batches)
    caller = torch.get_rng_state()
    rest = local(batches), torch.rand(()).item()
    torch.set_rng_state(caller)
    return rest, (local(data.iterate(skip=2, random=begun)), torch.rand(()).item())


@cache
def result() -> dict[str, Any]:
    return ls.launch(job, workers=len(REPLICAS), timeout_s=250)


@pytest.mark.parametrize("name", ["shuffled", "persistent", "stream"])
def test_workers_that_are_seeded_apart_draw_as_the_chief(split_cpu, name: str):
    with closing(ls.MirroredStrategy(split_cpu(3))) as strategy:
        torch.manual_seed(SEEDS[0])
        data = strategy.distribute_dataset(sources()[name])
        expected = [local(data) for _ in range(2)]
        drawn = torch.rand(()).item()
    workers = result()[name]
    assert [in_one([worker[epoch] for worker in workers]) for epoch in range(2)] == expected
    if name != "stream":
        assert result()[f"{name}: drawn after"] == [drawn, drawn]


def test_rows_of_two_workers_draw_other_numbers():
    rows = [torch.cat([torch.tensor(s) for b in e for s in b if s]) for worker in result()["drawing"] for e in worker]
    drawn = torch.cat(rows)[:, 1].tolist()
    assert len(set(drawn)) == len(drawn) == 20
    assert sorted(torch.cat(rows)[:, 0].tolist()) == sorted([*range(10)] * 2)
    first, second = result()["drawing: drawn after"]
    assert first == second


@pytest.mark.parametrize("name", ["shuffled", "persistent", "stream", "drawing"])
def test_passing_over_is_as_taking_on_every_worker(name: str):
    for rest, passed in result()[f"{name}: gone on"]:
        assert passed == rest
