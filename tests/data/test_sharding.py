from __future__ import annotations

import warnings
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.batch_lists import ListReader
from lockstep.data.sharding import batch_rows, join_batches, shard_sizes, split_batch
from lockstep.errors import DataError

Pair = namedtuple("Pair", ["image", "label"])


def test_sizes_are_balanced_the_larger_first_and_no_row_is_lost_or_doubled():
    assert shard_sizes(9, 4) == (3, 2, 2, 2)
    for rows in range(30):
        for replicas in range(1, 9):
            sizes = shard_sizes(rows, replicas)
            assert (len(sizes), sum(sizes)) == (replicas, rows)
            assert sorted(sizes, reverse=True) == list(sizes)
            assert max(sizes) - min(sizes) <= 1


def test_a_tensor_is_divided_into_views_of_its_own_memory():
    batch = torch.arange(8.0).reshape(4, 2)
    shards = split_batch(batch, 3)
    assert [shard.tolist() for shard in shards] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]
    assert shards[1].data_ptr() == batch[2:].data_ptr()


def test_an_empty_shard_keeps_dtype_and_trailing_shape():
    for batch in (torch.ones(1, 3, 5, dtype=torch.float16), np.ones((1, 3, 5), dtype=np.float16)):
        empty = split_batch(batch, 2)[1]
        assert (empty.shape, empty.dtype) == (torch.Size([0, 3, 5]), torch.float16)


def test_every_kind_of_structure_is_divided():
    rows = torch.arange(3)
    batch = [(rows, {"a": rows}), Pair(rows, UserDict(b=rows))]
    first, second = split_batch(batch, 2)
    assert first[0][0].tolist() == first[0][1]["a"].tolist() == first[1].image.tolist() == [0, 1]
    assert second[1].label["b"].tolist() == [2]
    assert isinstance(second[1], Pair)


def test_values_without_rows_go_to_every_replica_as_they_are():
    scalar, number = torch.tensor(3), np.float32(2)
    single = [scalar, number, 1, 0.5, True, "text", b"bytes", None]
    for shard in split_batch((torch.arange(2), *single), 2):
        assert len(shard[0]) == 1
        assert all(given is got for given, got in zip(single, shard[1:], strict=True))


def test_a_list_of_strings_as_long_as_the_batch_has_one_a_row():
    shards = split_batch({"id": ["a", "b", "c"], "all": ["a", "b"], "x": torch.ones(3)}, 2)
    assert [shard["id"] for shard in shards] == [["a", "b"], ["c"]]
    assert [shard["all"] for shard in shards] == [["a", "b"], ["a", "b"]]


def test_arrays_share_their_memory_with_the_shards():
    array = np.arange(4)
    shards = split_batch(array, 2)
    array[3] = 7
    assert shards[1].tolist() == [2, 7]


def test_arrays_that_cannot_be_shared_are_copied_without_a_warning():
    frozen = np.arange(4)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [shard.tolist() for shard in split_batch(frozen, 2)] == [[0, 1], [2, 3]]
        assert [shard.tolist() for shard in split_batch(np.arange(4)[::-1], 2)] == [[3, 2], [1, 0]]


def test_gradients_reach_the_global_batch():
    batch = torch.ones(3, requires_grad=True)
    first, second = split_batch(batch, 2)
    (first.sum() + 5 * second.sum()).backward()
    assert batch.grad.tolist() == [1, 1, 5]


def test_rows_are_those_of_the_tensors():
    assert batch_rows({"x": torch.ones(5, 2), "n": 3}) == 5
    assert batch_rows((np.ones(4), torch.tensor(1))) == 4
    assert batch_rows(torch.ones(0, 2)) == 0


def test_lengths_that_disagree_are_named():
    batch = ({"input_ids": torch.ones(8, 2), "mask": torch.ones(8)}, torch.ones(7))
    message = r'disagree in length: x\["input_ids"\]: 8 rows, x\["mask"\]: 8 rows, y: 7 rows; give all the same number'
    for divide in (batch_rows, lambda data: split_batch(data, 2)):
        with pytest.raises(DataError, match=message):
            divide(batch)


def test_of_many_tensors_the_first_are_named():
    batch = {str(number): torch.ones(number) for number in range(1, 12)}
    with pytest.raises(DataError, match=r'batch\["8"\]: 8 rows and 3 more; give'):
        batch_rows(batch)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (
            {"label": [1, 2], "text": "a"},
            r'a batch of batch\["label"\]\[0\]: int, .*: int, batch\["text"\]: str has no',
        ),
        (torch.tensor(3), "a batch of batch: Tensor has no rows"),
        ((), "a batch of nothing has no rows"),
    ],
)
def test_a_batch_without_rows_is_refused(batch, found):
    with pytest.raises(DataError, match=f"{found}.* batch the data with a DataLoader"):
        batch_rows(batch)


def test_a_leaf_of_another_type_is_refused():
    with pytest.raises(DataError, match=r'x\["graph"\] is a object, which cannot be divided .* collate_fn'):
        split_batch(({"graph": object()}, torch.ones(2)), 2)
    with pytest.raises(DataError, match="y is a PerReplica, which cannot be divided"):
        split_batch((torch.ones(2), PerReplica([1, 2])), 2)


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([{}, []], dtype=object), np.ones(2, dtype=">f4")])
def test_an_array_that_no_tensor_can_hold_is_refused(array):
    with pytest.raises(DataError, match=r"y is an array of dtype .*, which no tensor can hold; convert it"):
        split_batch((torch.ones(2), array), 2)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (torch.eye(4).to_sparse_coo(), "sparse_coo"),
        (torch.eye(4).to_sparse_csr(), "sparse_csr"),
    ],
)
def test_a_sparse_tensor_is_refused_by_name(batch, kind):
    with pytest.raises(DataError, match=f"x is a .*{kind}.*cannot be divided"):
        split_batch((batch, torch.ones(4)), 2)


def test_joined_batches_are_taken_in_order():
    joined = join_batches([{"x": torch.ones(2), "n": 1}, {"x": torch.zeros(3), "n": 2}], 2, ListReader())
    assert [shard.tolist() for shard in joined["x"]] == [[1, 1], [0, 0, 0]]
    assert joined["n"].values == (1, 2)


def test_replicas_without_a_batch_get_no_rows_of_the_first():
    joined = join_batches([(np.ones((2, 3), dtype=np.float32), "a")], 3, ListReader())
    assert [tuple(shard.shape) for shard in joined[0]] == [(2, 3), (0, 3), (0, 3)]
    assert {shard.dtype for shard in joined[0]} == {torch.float32}
    assert joined[1].values == ("a", "a", "a")


def test_joined_batches_have_one_structure():
    with pytest.raises(DataError, match=r"replica 1 .*x, y.*replica 0"):
        join_batches([torch.ones(2), (torch.ones(2), torch.ones(2))], 2, ListReader())
