"""Communicator with data of their own: nothing divided, functions; uneven lengths, and none at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tests.data.conftest import RunWorkers
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.collectives.communicator import Communicator
from lockstep.config import LogicalDevice
from lockstep.data.dataset import DistributedDataset, InputContext, PerReplicaDataset
from lockstep.errors import ConfigError, DataError


def own(workers: Communicator, source: Any, devices: Sequence[LogicalDevice]) -> DistributedDataset:
    return DistributedDataset(source, devices[: workers.replicas[workers.index]], workers=workers, shard="off")


def rows(dataset: Iterable[Any]) -> list[list[Any]]:
    return [[shard.tolist() for shard in batch] for batch in dataset]


def test_the_iteration_goes_on_until_all_have_ended(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)
    sources = [[torch.arange(3)], [torch.arange(2)] * 3, [torch.arange(1)]]

    def body(workers: Communicator) -> tuple[int, Any, Any]:
        data = own(workers, sources[workers.index], devices)
        return len(data), rows(data), rows(data)

    found = run_workers((2, 1, 1), body)

    assert found[0] == (3, [[[0, 1], [2]], [[], []], [[], []]], found[0][1])
    assert found[1] == (3, [[[0, 1]]] * 3, found[1][1])
    assert found[2] == (3, [[[0]], [[]], [[]]], found[2][1])


def test_a_worker_without_data_is_named(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)
    with pytest.raises(DataError, match="the data of worker 1 has no batch; give every worker at least one"):
        run_workers((1, 2), lambda workers: list(own(workers, [torch.ones(2)][workers.index :], devices)))


def test_a_length_is_known_where_all_know_it(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> None:
        source = [torch.ones(1)] if workers.is_chief else (torch.ones(1) for _ in range(2))
        with pytest.raises(TypeError, match="number of batches is unknown"):
            len(own(workers, source, devices))

    run_workers((1, 1), body)


@pytest.mark.parametrize("skip", [1, 2])
def test_each_worker_passes_over_what_it_has(split_cpu, run_workers: RunWorkers, skip: int):
    devices = split_cpu(1)

    def body(workers: Communicator) -> Any:
        data = own(workers, [torch.tensor([n]) for n in range(1 + 2 * workers.index)], devices)
        return rows(data.iterate(skip=skip))

    assert run_workers((1, 1), body) == [[[[]], [[]]][skip - 1 :], [[[1]], [[2]]][skip - 1 :]]


def test_a_function_is_told_its_place_among_the_workers(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)

    def body(workers: Communicator) -> tuple[InputContext, int, Any]:
        contexts = []

        def fn(context: InputContext) -> list[Tensor]:
            contexts.append(context)
            return [torch.tensor([n]) for n in range(3)][context.input_pipeline_id :]

        data = PerReplicaDataset(fn, devices[: workers.replicas[workers.index]], workers=workers)
        return contexts[0], len(data), rows(data)

    found = run_workers((2, 1), body)

    places = [InputContext(num_input_pipelines=2, input_pipeline_id=n, num_replicas_in_sync=3) for n in range(2)]
    assert found == [(places[0], 2, [[[0], [1]], [[2], []]]), (places[1], 2, [[[1]], [[2]]])]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("loader", [False, True])
def test_parts_of_hugging_face_data(split_cpu, run_workers: RunWorkers, streaming: bool, loader: bool):
    datasets = pytest.importorskip("datasets")
    devices = split_cpu(1)

    def body(workers: Communicator) -> list[int]:
        data: Any = datasets.Dataset.from_dict({"n": list(range(9))})
        data = (data.to_iterable_dataset(num_shards=4) if streaming else data).with_format("torch")
        part = data.shard(num_shards=workers.size, index=workers.index)
        source = DataLoader(part, batch_size=2, shuffle=None if streaming else True) if loader else part.batch(2)
        return [n for batch in own(workers, source, devices) for n in batch["n"][0].tolist()]

    first, second = run_workers((1, 1), body)

    assert sorted(first + second) == list(range(9))
    assert 3 <= len(first) <= 6


def test_an_unknown_way_to_divide_is_refused(split_cpu):
    with pytest.raises(ConfigError, match="shard='rows' is unknown; choose one of batch, file, off"):
        DistributedDataset([torch.ones(2)], split_cpu(1), shard="rows")  # type: ignore[arg-type]
