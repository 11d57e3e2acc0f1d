"""Communicator with data of their own: files divided, nothing divided, functions; uneven lengths, and none at all."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lockstep.collectives.communicator import Communicator
from lockstep.config import LogicalDevice
from lockstep.data.dataset import DistributedDataset, InputContext, PerReplicaDataset
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tests.data.conftest import RunWorkers


def own(workers: Communicator, source: Any, devices: Sequence[LogicalDevice], shard: Any = "off") -> DistributedDataset:
    return DistributedDataset(source, devices[: workers.replicas[workers.index]], workers=workers, shard=shard)


def rows(dataset: Iterable[Any]) -> list[list[Any]]:
    return [[shard.tolist() for shard in batch] for batch in dataset]


def test_the_iteration_goes_on_until_all_have_ended(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)
    sources = [[torch.arange(3)], [torch.arange(2)] * 3, []]

    def body(workers: Communicator) -> tuple[int, Any, Any]:
        data = own(workers, sources[workers.index], devices)
        return len(data), rows(data), rows(data)

    found = run_workers((2, 1, 1), body)

    assert found[0] == (3, [[[0, 1], [2]], [[], []], [[], []]], found[0][1])
    assert found[1] == (3, [[[0, 1]]] * 3, found[1][1])
    assert found[2] == (3, [[[]]] * 3, found[2][1])


def test_a_worker_without_data_learns_its_structure(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)
    batch = {
        "x": (torch.ones(3, 4, dtype=torch.bfloat16), [torch.zeros(3, 2, 1, dtype=torch.bool)]),
        1: torch.tensor(2.5, dtype=torch.float64),
        "names": ["a", None, 3],
    }

    def body(workers: Communicator) -> Any:
        (only,) = own(workers, [batch] if workers.is_chief else [], devices)
        return only

    _, empty = run_workers((1, 2), body)

    (x, (mask,)) = empty["x"]
    assert [(tuple(leaf.shape), leaf.dtype) for leaf in x] == [((0, 4), torch.bfloat16)] * 2
    assert [(tuple(leaf.shape), leaf.dtype) for leaf in mask] == [((0, 2, 1), torch.bool)] * 2
    assert empty[1][0].item() == 2.5
    assert empty[1][0].dtype == torch.float64
    assert [leaf[0] for leaf in empty["names"]] == ["a", None, 3]


class Pair(typing.NamedTuple):
    x: Tensor


def test_a_structure_that_cannot_be_sent_is_named(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> None:
        list(own(workers, [Pair(torch.ones(2))] if workers.is_chief else [], devices))

    with pytest.raises(DataError, match="cannot be sent to it: it has a Pair; make batches of tuples, lists and dicts"):
        run_workers((1, 1), body)


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


class Files:
    """A stream over files, that gives parts of itself."""

    def __init__(self, files: Sequence[int]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Any:
        return (torch.full((2,), n) for n in self.files)


def test_files_are_divided(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(2)

    found = run_workers((2, 1), lambda workers: rows(own(workers, Files([0, 1, 2]), devices, "file")))

    assert found == [[[[0], [0]], [[2], [2]]], [[[1, 1]], [[]]]]


def test_fewer_files_than_workers_are_refused(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    with pytest.raises(DataError, match="the data has 1 shards for 2 workers; save it in at least as many"):
        run_workers((1, 1), lambda workers: own(workers, Files([0]), devices, "file"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("loader", [False, True])
def test_hugging_face_data_is_divided(split_cpu, run_workers: RunWorkers, streaming: bool, loader: bool):
    datasets = pytest.importorskip("datasets")
    devices = split_cpu(1)

    def body(workers: Communicator) -> list[int]:
        data: Any = datasets.Dataset.from_dict({"n": list(range(9))})
        data = (data.to_iterable_dataset(num_shards=4) if streaming else data).with_format("torch")
        source = DataLoader(data, batch_size=2, shuffle=None if streaming else True) if loader else data.batch(2)
        return [n for batch in own(workers, source, devices, "file") for n in batch["n"][0].tolist()]

    first, second = run_workers((1, 1), body)

    assert sorted(first + second) == list(range(9))
    assert 3 <= len(first) <= 6


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ([torch.ones(2)], "list has no shard"),
        (DataLoader(TensorDataset(torch.ones(2))), "TensorDataset has no shard"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_has_no_files_is_refused(split_cpu, run_workers: RunWorkers, source: Any, reason: str, workers: int):
    devices = split_cpu(1)

    with pytest.raises(
        DataError, match=f'shard="file" cannot divide this data between workers: {reason}.*; give a Hugg'
    ):
        run_workers((1,) * workers, lambda each: own(each, source, devices, "file"))


def test_a_sampler_of_the_whole_data_is_refused(split_cpu, run_workers: RunWorkers):
    datasets = pytest.importorskip("datasets")
    devices = split_cpu(1)
    data = datasets.Dataset.from_dict({"n": list(range(9))})
    loader = DataLoader(data, sampler=RandomSampler(data, replacement=True))

    with pytest.raises(DataError, match="its DataLoader has a RandomSampler, which is about the whole data"):
        run_workers((1, 1), lambda workers: own(workers, loader, devices, "file"))


def test_an_unknown_way_to_divide_is_refused(split_cpu):
    with pytest.raises(ConfigError, match='shard=\'rows\' is unknown; choose "batch", "file" or "off"'):
        DistributedDataset([torch.ones(2)], split_cpu(1), shard="rows")  # type: ignore[arg-type]
