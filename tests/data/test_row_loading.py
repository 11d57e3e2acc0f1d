"""With ``replicas=`` every replica gets the same bits on every layout, whatever its data draws and however it is read.

The workers of a layout take turns here, each in the state in which the chief begins; the last test has real ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.conftest import Group, ThreadWorkers
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    get_worker_info,
)

import lockstep as ls
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator, all_gather_object
from lockstep.collectives.per_replica import select
from lockstep.data.batch_lists import ListReader
from lockstep.data.dataset import DistributedDataset, PerReplicaDataset
from lockstep.data.random_state import RandomState
from lockstep.data.readers import CheckedBatch
from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.data.row_loading import ReplicaRowsReader
from lockstep.data.worker_sync import WorkerSync
from lockstep.errors import CallbackError, DataError

numpy = pytest.importorskip("numpy")

REPLICAS = 4
LAYOUTS = [(4,), (3, 1), (1, 2, 1)]
ROWS = 22  # in batches of 5, the last of which leaves two of four replicas without rows


class Crops(Dataset[Tensor]):
    """Rows of different lengths, cropped at random: from torch's, Python's, NumPy's generators and its own of each."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(5)
        self.pythons = random.Random()
        self.numpys = numpy.random.default_rng()

    def __getitem__(self, index: int) -> Tensor:
        drawn = [torch.rand(()), random.random(), numpy.random.normal(), torch.rand((), generator=self.own)]
        drawn += [self.pythons.random(), self.numpys.random()]
        return torch.cat([torch.tensor([float(index), *drawn]), torch.randn(random.randrange(6))])

    def __len__(self) -> int:
        return ROWS


class ManyAtOnce(Crops):
    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        drawn = torch.rand(len(indices))
        return [torch.stack([torch.tensor(float(index)), each]) for index, each in zip(indices, drawn, strict=True)]


def masked(rows: list[Tensor]) -> dict[str, Any]:
    """Pads to the longest of the rows, then masks at random, as a collator for masked language models does."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.bernoulli(torch.full(padded.shape, 0.5)).bool()
    noise = torch.from_numpy(numpy.random.rand(len(rows)))
    return {"x": padded.masked_fill(mask, -1.0), "noise": noise, "names": [str(int(row[0])) for row in rows]}


def loader(dataset: Dataset[Any] | None = None, **settings: Any) -> DataLoader[Any]:
    batches = {} if "batch_sampler" in settings else {"batch_size": 5}
    return DataLoader(dataset or Crops(), collate_fn=masked, **batches, **settings)


def hub_rows() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [[float(row), 1.0] for row in range(ROWS)]}).with_format("torch")


def noisy(rows: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([row["x"] for row in rows]) + torch.rand(len(rows), 1)


def by_batch_sampler() -> BatchSampler:
    return BatchSampler(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(3)), 6, drop_last=False)


SOURCES: dict[str, Callable[[int], DataLoader[Any]]] = {
    "shuffled": lambda processes: loader(shuffle=True, num_workers=processes),
    "generator": lambda n: loader(shuffle=True, num_workers=n, generator=torch.Generator().manual_seed(2)),
    "drop_last": lambda n: loader(shuffle=True, drop_last=True, num_workers=n),
    "subset": lambda n: loader(sampler=SubsetRandomSampler(range(3, ROWS)), num_workers=n),
    "batch_sampler": lambda n: loader(batch_sampler=by_batch_sampler(), num_workers=n),
    "at once": lambda n: loader(ManyAtOnce(), shuffle=True, num_workers=n),
    "from the hub": lambda n: DataLoader(hub_rows(), batch_size=5, shuffle=True, collate_fn=noisy, num_workers=n),
}


def seeded() -> None:
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)


def distributed(
    source: DataLoader[Any], workers: Communicator, devices: Sequence[Any], *, prefetch: int | None = None
) -> DistributedIterable:
    """The data of one worker, which asks no other."""
    own = devices[: workers.replicas[workers.index]]
    if workers.is_single:
        return DistributedDataset(source, own, workers=workers, prefetch=prefetch)
    reader = ReplicaRowsReader(source, workers, ListReader.of(source))
    return DistributedIterable(reader, WorkerSync(), own, prefetch=prefetch)


def workers_of(layout: Sequence[int]) -> list[Communicator]:
    if len(layout) == 1:
        return [SingleWorkerCommunicator(layout[0], any_layout=True)]
    group = Group(layout)
    return [ThreadWorkers(group, index, any_layout=True) for index in range(len(layout))]


def bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.numpy().tobytes()
    return value


def shards(batches: Iterable[Any], workers: Communicator) -> list[list[Any]]:
    """Batch after batch, the bits of each local replica's shard."""
    found = []
    for batch in batches:
        whole = batch.batch if isinstance(batch, CheckedBatch) else batch
        replicas = workers.replicas[workers.index]
        found.append([bits(select(whole, replica, replicas)) for replica in range(replicas)])
    return found


@dataclass(frozen=True, kw_only=True)
class Found:
    """What two iterations gave all replicas."""

    first: list[list[Any]]
    second: list[list[Any]]
    begun: RandomState
    """The chief's generators when the second began."""
    drawn: tuple[float, ...]
    """What the caller drew afterwards, equal on all workers."""


def in_one(found: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Batch after batch, the shards of all workers' replicas in a row."""
    return [[shard for worker in batch for shard in worker] for batch in zip(*found, strict=True)]


def read(
    make: Callable[[], DataLoader[Any]], layout: Sequence[int], devices: Sequence[Any], *, prefetch: int | None = None
) -> Found:
    found: list[tuple[Any, Any, RandomState]] = []
    drawn = set()
    for workers in workers_of(layout):
        seeded()
        data = distributed(make(), workers, devices, prefetch=prefetch)
        first, begun = shards(data, workers), data.random_state()
        found.append((first, shards(data, workers), begun))
        drawn.add((torch.rand(()).item(), random.random(), numpy.random.rand()))
    firsts, seconds, states = zip(*found, strict=True)
    (only,) = drawn
    return Found(first=in_one(firsts), second=in_one(seconds), begun=states[0], drawn=only)


def resumed(
    make: Callable[[], DataLoader[Any]], layout: Sequence[int], devices: Sequence[Any], begun: RandomState, *, skip: int
) -> list[list[Any]]:
    """What an iteration that began with ``begun`` gives all replicas from batch ``skip`` on."""
    found = []
    for workers in workers_of(layout):
        torch.manual_seed(99)
        with closing(distributed(make(), workers, devices).iterate(skip=skip, random=begun)) as batches:
            found.append(shards(batches, workers))
    return in_one(found)


_in_one_process: dict[str, Found] = {}


def in_one_process(name: str, devices: Sequence[Any]) -> Found:
    """What one process without loading processes gives; made once."""
    if name not in _in_one_process:
        _in_one_process[name] = read(lambda: SOURCES[name](0), (REPLICAS,), devices)
    return _in_one_process[name]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_a_replica_gets_the_same_bits_on_every_layout(split_cpu, name: str, layout: tuple[int, ...]):
    devices = split_cpu(REPLICAS)
    expected = in_one_process(name, devices)
    found = read(lambda: SOURCES[name](0), layout, devices)
    assert found.first == expected.first
    assert found.second == expected.second
    assert found.drawn == expected.drawn
    assert found.first != found.second


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["shuffled", "generator", "persistent"])
def test_processes_load_the_same_bits(split_cpu, name: str, layout: tuple[int, ...]):
    devices = split_cpu(REPLICAS)
    if name == "persistent":  # its processes draw a seed for each iteration
        data = read(lambda: loader(shuffle=True, num_workers=2, persistent_workers=True), layout, devices)
    else:
        data = read(lambda: SOURCES[name](2), layout, devices)
    expected = in_one_process("shuffled" if name == "persistent" else name, devices)
    assert (data.first, data.second, data.drawn) == (expected.first, expected.second, expected.drawn)


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize(("before", "after"), [((4,), (1, 2, 1)), ((3, 1), (4,)), ((1, 2, 1), (3, 1))])
@pytest.mark.parametrize("name", SOURCES)
def test_an_iteration_goes_on_with_the_same_bits_on_another_layout(
    split_cpu, name: str, before: tuple[int, ...], after: tuple[int, ...], skip: int
):
    devices = split_cpu(REPLICAS)
    begun = read(lambda: SOURCES[name](0), before, devices).begun
    rest = resumed(lambda: SOURCES[name](0), after, devices, begun, skip=skip)
    assert rest == in_one_process(name, devices).second[skip:]


@pytest.mark.parametrize("processes", [0, 2])
def test_what_is_passed_over_is_not_loaded(split_cpu, processes: int):
    devices = split_cpu(REPLICAS)
    expected = in_one_process("shuffled", devices)

    class Late(Crops):
        def __getitem__(self, index: int) -> Tensor:
            if index in used:
                raise AssertionError(f"row {index} was loaded again")
            return super().__getitem__(index)

    used = {int(name) for batch in expected.second[:3] for shard in batch for name in shard["names"]}
    assert len(used) == 15

    def make() -> DataLoader[Any]:
        return loader(Late(), shuffle=True, num_workers=processes)

    assert resumed(make, (REPLICAS,), devices, expected.begun, skip=3) == expected.second[3:]


def test_data_that_draws_may_be_read_ahead(split_cpu):
    class Drawing(Crops):
        def __getitem__(self, index: int) -> Tensor:
            return torch.cat([torch.tensor([float(index)]), torch.randn(1 + index % 3)])

    def drawn_ahead(prefetch: int) -> Found:
        return read(lambda: DataLoader(Drawing(), 5, collate_fn=padded), (REPLICAS,), devices, prefetch=prefetch)

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) + torch.rand(())

    devices = split_cpu(REPLICAS)
    ahead, by_itself = drawn_ahead(2), drawn_ahead(0)
    assert (ahead.first, ahead.second, ahead.drawn) == (by_itself.first, by_itself.second, by_itself.drawn)


def test_no_two_replicas_batches_or_iterations_draw_the_same(split_cpu):
    data = in_one_process("at once", split_cpu(REPLICAS))
    noise = [shard["noise"] for iteration in (data.first, data.second) for batch in iteration for shard in batch]
    drawn = [own for *_, own in noise if own]
    assert len(set(drawn)) == len(drawn) == 2 * (4 * REPLICAS + 2)


def test_shards_without_rows_have_the_structure_of_the_others(split_cpu):
    data = DistributedDataset(
        loader(), split_cpu(REPLICAS), workers=SingleWorkerCommunicator(REPLICAS, any_layout=True)
    )
    *_, last = data
    assert [len(shard) for shard in last["x"]] == [1, 1, 0, 0]
    assert {shard.ndim for shard in last["x"]} == {2}
    assert [list(shard) for shard in last["names"]] == [["20"], ["21"], [], []]


def test_each_replica_is_padded_by_itself_and_copied(split_cpu):
    workers = SingleWorkerCommunicator(2, any_layout=True)
    whole = torch.arange(12.0)

    def views(rows: list[int]) -> Tensor:
        return whole[1 : 1 + len(rows) * max(rows)].view(len(rows), max(rows)).t().t()

    data = DistributedDataset(DataLoader([1, 2, 2, 5], 4, collate_fn=views), split_cpu(2), workers=workers)  # type: ignore[arg-type]
    ((first, second),) = data

    assert (first.shape, second.shape) == ((2, 2), (2, 5))
    assert {first.storage_offset(), second.storage_offset()} == {0}


def test_a_shard_whose_leaves_disagree_is_refused(split_cpu):
    workers = SingleWorkerCommunicator(2, any_layout=True)
    data = DistributedDataset(
        DataLoader(range(4), 4, collate_fn=lambda rows: {"x": torch.zeros(len(rows)), "mean": torch.zeros(1)}),  # type: ignore[arg-type]
        split_cpu(2),
        workers=workers,
    )
    with pytest.raises(DataError, match=r"disagree in length: .*\"x\".*2 rows.*\"mean\".*1 row"):
        list(data)


def note_name(process: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.name = type(info.dataset).__name__  # type: ignore[attr-defined]


class Named(Dataset[Tensor]):
    name = "nothing"

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(len(self.name))

    def __len__(self) -> int:
        return 4


def test_the_users_set_up_of_a_process_sees_the_users_dataset(split_cpu):
    workers = SingleWorkerCommunicator(2, any_layout=True)
    source = DataLoader(Named(), batch_size=4, num_workers=1, worker_init_fn=note_name)
    ((first, second),) = DistributedDataset(source, split_cpu(2), workers=workers)
    assert [*first.tolist(), *second.tolist()] == [len("Named")] * 4


def test_per_replica_batches_are_copied(split_cpu):
    whole = torch.arange(6)
    workers = SingleWorkerCommunicator(2, any_layout=True)
    ((first, second),) = PerReplicaDataset(lambda _: [whole[:3], whole[3:]], split_cpu(2), workers=workers)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert {first.storage_offset(), second.storage_offset()} == {0}


class StopAt(ls.callbacks.Callback):
    def __init__(self, step: int) -> None:
        self.left = step

    def on_train_batch_end(self, *args: Any, **named: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("the step is reached")


class LabelledCrops(Crops):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[:7], torch.tensor(index % 3)


def test_a_training_that_goes_on_within_an_epoch_on_other_devices_ends_with_the_same_bits(split_cpu, tmp_path: Path):
    devices = split_cpu(3)

    def train(devices: Sequence[Any], backup: str, processes: int, *callbacks: ls.callbacks.Callback) -> str:
        torch.manual_seed(7)
        source = DataLoader(LabelledCrops(), 5, shuffle=True, num_workers=processes)
        with closing(ls.MirroredStrategy(devices, replicas=REPLICAS, seed=1)) as strategy:
            with strategy.scope():
                module = torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 3))
                model = ls.Model(module)
                model.compile(torch.optim.Adam(module.parameters(), lr=0.01), torch.nn.CrossEntropyLoss())
            restored = ls.callbacks.BackupAndRestore(tmp_path / backup, save_freq=1)
            model.fit(source, epochs=2, callbacks=[restored, *callbacks], verbose=0)
            return ls.fingerprint(model)

    expected = train(devices[:1], "whole", 0)
    with pytest.raises(CallbackError, match="the step is reached"):
        train(devices[:1], "stopped", 0, StopAt(8))
    assert train(devices, "stopped", 2) == expected


PROCESSES = (0, 2)


def digests(batches: Iterable[Any], strategy: ls.Strategy) -> list[list[str]]:
    found = shards(batches, strategy.workers)
    return [[hashlib.sha256(repr(shard).encode()).hexdigest() for shard in batch] for batch in found]


def by_strategy(strategy: ls.Strategy, others: Sequence[RandomState]) -> list[dict[str, Any]]:
    """For each number of loading processes: two iterations, and the rest of one that ``others`` began."""
    found = []
    for processes, begun in zip(PROCESSES, others, strict=True):
        seeded()
        torch.manual_seed(1 + strategy.workers.index)  # the chief's are taken
        data = strategy.distribute_dataset(loader(shuffle=True, num_workers=processes))
        first, state = digests(data, strategy), data.random_state()
        second, drawn = digests(data, strategy), torch.rand(()).item()
        rest = digests(data.iterate(skip=2, random=begun), strategy) if begun else []
        found.append({"first": first, "second": second, "rest": rest, "drawn": drawn, "begun": state})
    return found


def job(others: Sequence[RandomState]) -> list[list[dict[str, Any]]]:
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], replicas=3)
    found = by_strategy(strategy, others)
    everyones: list[list[dict[str, Any]]] = all_gather_object(strategy.workers, "found", found)
    strategy.close()
    return everyones


@pytest.mark.workers
def test_workers_and_one_process_get_the_same_bits_and_go_on_for_each_other(split_cpu):
    nobodys: list[RandomState] = [{} for _ in PROCESSES]
    with closing(ls.MirroredStrategy(split_cpu(1), replicas=3)) as strategy:
        expected = by_strategy(strategy, nobodys)

    workers = ls.launch(job, workers=2, args=([one["begun"] for one in expected],), timeout_s=250)

    for one, found in zip(expected, zip(*workers, strict=True), strict=True):
        assert [len(worker["first"][0]) for worker in found] == [2, 1]
        for part in ("first", "second"):
            assert in_one([worker[part] for worker in found]) == one[part]
        assert in_one([worker["rest"] for worker in found]) == one["second"][2:]
        assert {worker["drawn"] for worker in found} == {one["drawn"]}
    with closing(ls.MirroredStrategy(["cpu:0"], replicas=3)) as strategy:
        back = by_strategy(strategy, [found["begun"] for found in workers[0]])
    assert [found["rest"] for found in back] == [one["second"][2:] for one in expected]
