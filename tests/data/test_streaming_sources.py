"""Data that streams, with the libraries that users have: each worker's part, and where a resume goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from tests.data.conftest import RunWorkers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.checkpoint.format import flatten, unflatten
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator
from lockstep.data.dataset import DistributedDataset, PerReplicaDataset
from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.data.streaming_sources import StatefulSource
from lockstep.errors import CheckpointError, DataError

datasets = pytest.importorskip("datasets")
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


def stream(shards: int = 3, rows: int = 22, first: int = 0) -> Any:
    """Rows ``{"n": first}`` and so on, in torch format."""
    data: Any = datasets.Dataset.from_dict({"n": list(range(first, first + rows))})
    return data.to_iterable_dataset(num_shards=shards).with_format("torch")


def mixed(stopping: str = "first_exhausted") -> Any:
    parts = [stream(), stream(first=100)]
    found: Any = datasets.interleave_datasets(parts, probabilities=[0.3, 0.7], seed=1, stopping_strategy=stopping)
    return found.with_format("torch")  # what is interleaved has no format


class Counting(IterableDataset[Tensor]):
    """Numbers that tells how far it has come, and which rows it has read."""

    def __init__(self) -> None:
        self.place, self.read = 0, list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        start, self.place = self.place, 0
        for number in range(start, 10):
            self.read.append(number)
            self.place = number + 1
            yield torch.tensor(number)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


TELLS: dict[str, Callable[[], Iterable[Any]]] = {
    "batches": lambda: stream().batch(4),
    "mapped in batches": lambda: stream().map(lambda rows: {"n": rows["n"] + 50}, batched=True, batch_size=5).batch(4),
    "filtered": lambda: stream().filter(lambda row: row["n"] % 3).batch(4),
    "interleaved": lambda: mixed().batch(4),
    "concatenated": lambda: datasets.concatenate_datasets([stream(), stream(first=100)]).batch(4),
    "taken": lambda: stream().skip(2).take(15).batch(4),
    "loader": lambda: DataLoader(stream(), batch_size=4),
    "stateful loader": lambda: StatefulDataLoader(stream(), batch_size=4),
    "stateful loader of rows": lambda: StatefulDataLoader(
        TensorDataset(torch.arange(22)), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "own": lambda: DataLoader(Counting(), batch_size=2),
}
READ_OVER: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: stream().shuffle(seed=1, buffer_size=6).batch(4),
    "shuffled in a loader": lambda: StatefulDataLoader(stream().shuffle(seed=1, buffer_size=6), batch_size=4),
    "interleaved until all have ended": lambda: mixed("all_exhausted").batch(4),
    "loader with processes": lambda: DataLoader(stream(), batch_size=4, num_workers=1),
}


def numbers(batch: Any) -> list[int]:
    return torch.cat(list(leaf_of(batch))).tolist()


def leaf_of(batch: Any) -> Any:
    return batch["n"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch


def saved(data: DistributedIterable) -> Any:
    """The position, as a checkpoint that was written and read has it."""
    tree, tensors = flatten(data.state_dict())
    return unflatten(json.loads(json.dumps(tree)), tensors)


@pytest.mark.parametrize("name", [*TELLS, *READ_OVER])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_position_goes_on_at_the_very_sample_again_and_again(split_cpu, name: str, prefetch: int):
    def make() -> DistributedDataset:
        torch.manual_seed(1)
        return DistributedDataset({**TELLS, **READ_OVER}[name](), split_cpu(2), prefetch=prefetch)

    data = make()
    data.set_epoch(1)
    first = [numbers(batch) for batch in data]
    data.set_epoch(2)
    second = [numbers(batch) for batch in data]
    assert len(first) > 3

    data = make()
    data.set_epoch(1)
    with closing(iter(data)) as batches:
        found = [numbers(batch) for batch in islice(batches, 1)]
        position = saved(data)
    assert (position["source"] is not None) == (name in TELLS)
    for _ in range(2):  # a resumed iteration is saved and resumed itself
        data = make()
        data.set_epoch(1)
        data.load_state_dict(position)
        with closing(iter(data)) as batches:
            found += [numbers(batch) for batch in islice(batches, 1)]
            position = saved(data)
    data = make()
    data.set_epoch(1)
    data.load_state_dict(position)
    found += [numbers(batch) for batch in data]
    data.set_epoch(2)
    assert (found, [numbers(batch) for batch in data]) == (first, second)


def test_what_was_used_is_not_read_again(split_cpu):
    data = DistributedDataset(DataLoader(Counting(), batch_size=2), split_cpu(1))
    with closing(iter(data)) as batches:
        list(islice(batches, 3))
        position = saved(data)
    rows = Counting()

    data = DistributedDataset(DataLoader(rows, batch_size=2), split_cpu(1))
    data.load_state_dict(position)

    assert [numbers(batch) for batch in data] == [[6, 7], [8, 9]]
    assert rows.read == [6, 7, 8, 9]


@pytest.mark.parametrize("name", ["batches", "stateful loader"])
def test_an_iteration_after_a_resumed_one_begins_at_the_first_row(split_cpu, name: str):
    data = DistributedDataset(TELLS[name](), split_cpu(1))
    expected = [numbers(batch) for batch in data]
    with closing(iter(data)) as batches:
        next(batches)
        position = saved(data)
    data.load_state_dict(position)
    assert [numbers(batch) for batch in data] == expected[1:]
    assert [numbers(batch) for batch in data] == expected  # of the same epoch


@pytest.mark.parametrize("name", [name for name in TELLS if name != "own"])
def test_loops_left_early_are_those_of_one_device(split_cpu, name: str):
    torch.manual_seed(1)
    source = TELLS[name]()
    expected = [torch.as_tensor(leaf_of(batch)).tolist() for _ in range(2) for batch in islice(iter(source), 3)]
    torch.manual_seed(1)
    data = DistributedDataset(TELLS[name](), split_cpu(1))
    found: list[list[int]] = []
    for _ in range(2):
        with closing(iter(data)) as batches:
            found += [numbers(batch) for batch in islice(batches, 3)]

    assert found == expected


def test_each_worker_reads_its_shards_and_a_resume_reads_the_rest(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def make(workers: Communicator) -> DistributedDataset:
        source = StatefulDataLoader(stream(), batch_size=3) if workers.size == 2 else stream().batch(3)
        return DistributedDataset(source, devices, workers=workers, shard="file")

    def whole(workers: Communicator) -> list[list[int]]:
        return [numbers(batch) for batch in make(workers)]

    def resumed(workers: Communicator, taken: int) -> list[list[int]]:
        data = make(workers)
        with closing(iter(data)) as batches:
            found = [numbers(batch) for batch in islice(batches, taken)]
            position = saved(data)
        data = make(workers)
        data.load_state_dict(position)
        return found + [numbers(batch) for batch in data]

    for replicas in ((1, 1), (1, 1, 1)):
        parts = run_workers(replicas, whole)
        assert len({len(part) for part in parts}) == 1
        assert sorted(n for part in parts for batch in part for n in batch) == list(range(22))
        for taken in range(1, len(parts[0]) + 1):
            assert run_workers(replicas, resumed, taken) == parts
    (first, second) = run_workers((1, 1), whole)
    assert first[-1]  # a worker whose shards have ended waits with empty batches
    assert second[-1] == []


def test_loading_processes_divide_a_worker_s_shards(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> list[int]:
        source = DataLoader(stream(4), batch_size=3, num_workers=2)
        data = DistributedDataset(source, devices, workers=workers, shard="file")
        return [n for batch in data for n in numbers(batch)]

    first, second = run_workers((1, 1), body)
    assert first
    assert second
    assert sorted(first + second) == list(range(22))


def refused(run_workers: RunWorkers, devices: Any, make: Callable[[Communicator], Any]) -> str:
    def body(workers: Communicator) -> None:
        with pytest.raises(DataError) as raised:
            DistributedDataset(make(workers), devices, workers=workers, shard="file")
        found.append(str(raised.value))

    found: list[str] = []
    run_workers((1, 1), body)
    assert len(found) == 2
    assert "\n" not in found[0]
    return found[0]


def test_what_cannot_be_divided_is_one_line_on_every_worker(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)
    few = refused(run_workers, devices, lambda _: stream(1).batch(2))
    assert all(word in few for word in ("1 shard", "2 workers", "reshard", 'shard="batch"'))
    assert "list" in refused(run_workers, devices, lambda _: [torch.ones(2)])
    assert "DataLoader" in refused(run_workers, devices, lambda _: DataLoader(TensorDataset(torch.ones(2))))
    seeds = refused(run_workers, devices, lambda workers: stream().shuffle(seed=workers.index).batch(2))
    assert all(word in seeds for word in ("worker 1", "shuffle", "seed"))
    assert "worker 1 has 4 shards" in refused(run_workers, devices, lambda workers: stream(3 + workers.index).batch(2))


def position_of(source: Any, devices: Any) -> Any:
    data = DistributedDataset(source, devices)
    with closing(iter(data)) as batches:
        next(batches)
        return saved(data)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: stream(4).batch(4), ("3 shards", "4 shards")),
        (lambda: stream().map(lambda row: row).filter(lambda _: True).batch(4), ("FilteredExamplesIterable",)),
    ],
)
def test_a_position_in_other_data_is_one_line(split_cpu, other: Callable[[], Any], words: tuple[str, ...]):
    devices = split_cpu(1)
    data = DistributedDataset(other(), devices)
    data.load_state_dict(position_of(stream().batch(4), devices))
    with pytest.raises(CheckpointError) as raised:
        iter(data)
    assert all(word in str(raised.value) for word in (*words, "give the data that it was saved with"))


def test_a_position_in_a_worker_s_own_data_needs_as_many_workers(split_cpu, run_workers: RunWorkers):
    devices = split_cpu(1)

    def body(workers: Communicator) -> Any:
        data = DistributedDataset(stream().batch(4), devices, workers=workers, shard="file")
        with closing(iter(data)) as batches:
            next(batches)
            return saved(data)

    position = run_workers((1, 1), body)[1]
    alone = DistributedDataset(stream().batch(4), devices, workers=SingleWorkerCommunicator(1), shard="file")
    alone.load_state_dict(position)

    with pytest.raises(CheckpointError, match=r"worker 1 of 2.*as many workers"):
        iter(alone)


def test_a_source_that_no_longer_tells_is_read_over(split_cpu):
    devices = split_cpu(1)
    expected = [numbers(batch) for batch in DistributedDataset(stream().batch(4), devices)]
    data = DistributedDataset(list(stream().batch(4)), devices)
    data.load_state_dict(position_of(stream().batch(4), devices))
    assert [numbers(batch) for batch in data] == expected[1:]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shuffled", "rows in its buffer"),
        ("interleaved until all have ended", "interleaved"),
        ("loader with processes", "processes of a DataLoader"),
        ("generator", "generator does not tell its state"),
    ],
)
def test_a_line_says_that_batches_are_read_again_and_why(split_cpu, name: str, reason: str):
    def make() -> DistributedDataset:
        sources = {**READ_OVER, "generator": lambda: (torch.arange(4) for _ in range(3))}
        return DistributedDataset(sources[name](), split_cpu(1))

    data = make()
    with closing(iter(data)) as batches:
        next(batches)
        position = saved(data)
    data = make()
    data.load_state_dict(position)

    with pytest.warns(UserWarning, match=rf"\(1\) are read again.*{reason}"), closing(iter(data)):
        pass


def test_a_generator_that_was_read_is_not_read_on_as_if_it_were_at_its_beginning(split_cpu):
    data = DistributedDataset((torch.arange(4) for _ in range(3)), split_cpu(1))
    with closing(iter(data)) as batches:
        next(batches)
        data.load_state_dict(saved(data))
    with pytest.raises(CheckpointError, match=r"generator can be read only once.*make the data anew"):
        iter(data)


def test_batches_of_each_replica_go_on_at_the_very_sample(split_cpu):
    def make() -> PerReplicaDataset:
        return PerReplicaDataset(lambda _: DataLoader(Counting(), batch_size=2), split_cpu(2))

    data = make()
    with closing(iter(data)) as batches:
        found = [numbers(next(batches))]
        position = saved(data)
    data = make()
    data.load_state_dict(position)

    assert found + [numbers(batch) for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_the_lists_of_a_batch_hold_is_known_after_a_resume(split_cpu):
    x = torch.arange(10.0).reshape(5, 2)
    parts = [x[:3], x[3:]]  # the second one has as many rows as the list has items

    class Pairs(Counting):
        def __iter__(self) -> Iterator[Any]:
            for part in parts[self.place :]:
                self.place += 1
                yield [part, -part]

    data = DistributedDataset(Pairs(), split_cpu(1))
    data.load_state_dict(position_of(Pairs(), split_cpu(1)))

    assert [batch[1].values[0].tolist() for batch in data] == [(-x[3:]).tolist()]


def test_a_source_without_both_methods_has_no_state():
    assert StatefulSource.of([torch.ones(2)]) is None
    assert StatefulSource.of(DataLoader(TensorDataset(torch.ones(2)))) is None
