from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.dataset import DistributedDataset, InputContext, PerReplicaDataset
from lockstep.errors import DataError


@pytest.fixture
def three(split_cpu):
    return split_cpu(3)


def rows(dataset):
    return [[shard.tolist() for shard in batch] for batch in dataset]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_global_batches_are_divided(three, prefetch):
    dataset = DistributedDataset(DataLoader(range(8), batch_size=4), three, prefetch=prefetch)
    expected = [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]
    assert rows(dataset) == expected
    assert rows(dataset) == expected
    assert len(dataset) == 2


def test_leaves_are_per_replica_in_the_structure_of_the_data(three):
    data = TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    first, last = DistributedDataset(DataLoader(data, batch_size=4), three)
    x, y = first
    assert isinstance(x, PerReplica)
    assert [tuple(shard.shape) for shard in x] == [(2, 2), (1, 2), (1, 2)]
    assert [tuple(shard.shape) for shard in last[0]] == [(1, 2), (0, 2), (0, 2)]
    assert [shard.tolist() for shard in last[1]] == [[4], [], []]
    assert y[2].dtype == torch.int64


def test_dicts_and_lists_of_batches_are_data_too(three):
    batches = [{"x": torch.arange(3), "step": 1}, {"x": torch.arange(2), "step": 2}]
    found = [(batch["x"][1].tolist(), batch["step"].values) for batch in DistributedDataset(batches, three)]
    assert found == [([1], (1, 1, 1)), ([1], (2, 2, 2))]


class Indexed:
    """A dataset by Python's old protocol: indices until IndexError."""

    def __getitem__(self, index):
        if index > 1:
            raise IndexError
        return torch.full((3,), index)


def test_a_dataset_with_indices_alone_is_data_too(three):
    assert rows(DistributedDataset(Indexed(), three)) == [[[0]] * 3, [[1]] * 3]


def test_a_generator_is_data_once(three):
    dataset = DistributedDataset((torch.arange(3) for _ in range(2)), three)
    assert len(rows(dataset)) == 2
    assert rows(dataset) == []


class Beginning:
    """Notes when iterating over it begins."""

    begun = 0

    def __iter__(self):
        self.begun += 1
        return iter([torch.arange(3)])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_source_is_begun_with_the_iteration(three, prefetch):
    source = Beginning()
    dataset = DistributedDataset(source, three, prefetch=prefetch)
    assert source.begun == 0
    iter(dataset)
    assert source.begun == 1
    per_replica = PerReplicaDataset(lambda _: source, three, prefetch=prefetch)
    assert source.begun == 1
    iter(per_replica)
    assert source.begun == 2


def test_two_iterations_at_once_do_not_disturb_each_other(three):
    dataset = DistributedDataset(DataLoader(range(6), batch_size=3), three)
    pairs = [(a[0].tolist(), b[0].tolist()) for a, b in zip(dataset, dataset, strict=True)]
    assert pairs == [([0], [0]), ([3], [3])]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_shuffling_is_that_of_a_plain_loop_with_the_same_seed(three, prefetch, workers):
    loader = DataLoader(range(12), batch_size=4, shuffle=True, num_workers=workers)
    torch.manual_seed(3)
    plain = [torch.cat(list(loader)).tolist() for _ in range(2)]
    dataset = DistributedDataset(loader, three, prefetch=prefetch)
    torch.manual_seed(3)
    assert [torch.cat([shard for batch in dataset for shard in batch]).tolist() for _ in range(2)] == plain


def test_a_loop_left_early_leaves_no_thread(three):
    before = threading.active_count()
    dataset = DistributedDataset([torch.arange(3)] * 9, three, prefetch=2)
    for _ in dataset:
        break
    gc.collect()
    assert threading.active_count() == before
    with contextlib.closing(iter(dataset)) as batches:
        next(batches)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_cannot_be_divided_is_an_error_in_the_loop(three, prefetch):
    batches = [(torch.ones(3), torch.ones(3)), (torch.ones(3), torch.ones(2))]
    iterator = iter(DistributedDataset(batches, three, prefetch=prefetch))
    next(iterator)
    with pytest.raises(DataError, match="disagree in length: x: 3 rows, y: 2 rows"):
        next(iterator)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_the_length_is_unknown_where_the_source_has_none(three):
    for source in ((torch.ones(3) for _ in range(2)), DataLoader(Stream(), batch_size=2)):
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            len(DistributedDataset(source, three))


class EpochRecorder(torch.utils.data.Dataset):
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 8


def test_the_epoch_reaches_samplers_and_data(three):
    recorder = EpochRecorder()
    sampler = DistributedSampler(recorder, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(recorder, batch_size=4, sampler=sampler)
    for dataset in (DistributedDataset(loader, three), PerReplicaDataset(lambda _: loader, three)):
        dataset.set_epoch(0)
        first = str(rows(dataset))
        dataset.set_epoch(1)
        assert str(rows(dataset)) != first
        dataset.set_epoch(0)
        assert str(rows(dataset)) == first
    assert recorder.epochs == [0, 1, 0] * 2


def test_a_sampler_that_leaves_rows_to_other_processes_is_refused(three):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(DataError, match="with a DistributedSampler, which takes one worker's part of the data already"):
        DistributedDataset(DataLoader(range(8), sampler=sampler), three)


def test_data_without_epochs_takes_none(three):
    DistributedDataset([torch.ones(3)], three).set_epoch(1)
    DistributedDataset(DataLoader(range(4)), three).set_epoch(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(4), "received a Tensor, expected an iterable of global batches; give a DataLoader, such as"),
        ({"x": torch.ones(4)}, "received a dict, expected an iterable of global batches"),
        ("data.csv", "received a str, expected an iterable of global batches"),
        (3, "received a int, expected an iterable of global batches"),
        (None, "received a NoneType, expected an iterable of global batches"),
    ],
)
def test_what_is_no_data_is_refused(three, data, message):
    with pytest.raises(DataError, match=message):
        DistributedDataset(data, three)
    with pytest.raises(DataError, match=message):
        PerReplicaDataset(lambda _: data, three)


def test_data_is_distributed_once(three):
    once = DistributedDataset([torch.ones(3)], three)
    with pytest.raises(DataError, match="distributed already; distribute the original once"):
        DistributedDataset(once, three)


def test_a_function_is_called_once_with_its_place(three):
    contexts = []

    def fn(context):
        contexts.append(context)
        return DataLoader(range(8), batch_size=context.get_per_replica_batch_size(6))

    dataset = PerReplicaDataset(fn, three)
    expected = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [], []]]
    assert rows(dataset) == expected
    assert rows(dataset) == expected
    assert len(dataset) == 2
    assert contexts == [InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=3)]


def test_a_global_batch_is_divided_among_all_replicas():
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128) == 32
    for size, choice in ((10, "choose 8 or 12"), (2, "choose 4"), (0, "choose 4"), (-4, "choose 4")):
        with pytest.raises(ValueError, match=f"global_batch_size={size} does not divide among 4 replicas; {choice}$"):
            InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


def test_a_place_is_one_of_those_there_are():
    for settings in ({"num_replicas_in_sync": 0}, {"num_input_pipelines": 0}, {"input_pipeline_id": -1}):
        with pytest.raises(ValueError, match="give at least 1 replica, and an id below num_input_pipelines"):
            InputContext(**settings)
    with pytest.raises(ValueError, match=r"input_pipeline_id=2, .*and an id below num_input_pipelines"):
        InputContext(num_input_pipelines=2, input_pipeline_id=2)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_per_replica_batches_are_taken_as_they_are(three, prefetch):
    batches = [torch.ones(size, dtype=torch.float16) for size in (1, 5, 2, 3)]
    dataset = PerReplicaDataset(lambda _: batches, three, prefetch=prefetch)
    assert [[len(shard) for shard in batch] for batch in dataset] == [[1, 5, 2], [3, 0, 0]]
    assert {shard.dtype for batch in dataset for shard in batch} == {torch.float16}


def test_hugging_face_data_in_torch_format(three):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"ids": [[n, n] for n in range(8)], "label": list(range(8))})
    batched = data.with_format("torch").batch(4)
    found = [(batch["ids"][1].tolist(), batch["label"][2].tolist()) for batch in DistributedDataset(batched, three)]
    assert found == [([[2, 2]], [3]), ([[6, 6]], [7])]
    with pytest.raises(DataError, match=r"has no rows to divide.* torch format"):
        next(iter(DistributedDataset(data.batch(4), three)))


def test_outside_replicas_a_batch_encoding_is_a_dict(three):
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(6).reshape(3, 2)})
    (batch,) = DistributedDataset([(encoding, torch.arange(3))], three)
    assert isinstance(batch[0], dict)
    assert batch[0]["input_ids"][2].tolist() == [[4, 5]]
