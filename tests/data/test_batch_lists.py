"""Which lists of a batch have one item a row: every replica gets what one device has of its rows, or an error does."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.oracle import assert_close, sgd, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator
from lockstep.collectives.per_replica import select
from lockstep.data.batch_lists import ListReader
from lockstep.data.dataset import DistributedDataset
from lockstep.data.sharding import split_batch
from lockstep.errors import ConfigError, DataError


def images(rows: int, side: int = 5) -> list[Tensor]:
    return [torch.full((3, side, side), float(row)) for row in range(rows)]


def firsts(shards: Iterable[Any]) -> list[list[float]]:
    return [[float(image.flatten()[0]) for image in shard] for shard in shards]


def test_a_list_of_images_beside_labels_is_one_of_rows():
    batch = (images(4), torch.arange(4))
    shards = split_batch(batch, 3)
    assert firsts(x for x, _ in shards) == [[0, 1], [2], [3]]
    assert [y.tolist() for _, y in shards] == [[0, 1], [2], [3]]
    assert {tuple(image.shape) for x, _ in shards for image in x} == {(3, 5, 5)}


def test_what_detectors_get_is_divided_by_rows():
    targets = [{"boxes": torch.full((row + 1, 4), row), "labels": torch.full((row + 1,), row)} for row in range(4)]
    shards = split_batch((images(4), targets), 3)
    assert firsts(x for x, _ in shards) == [[0, 1], [2], [3]]
    assert [[int(target["labels"][0]) for target in y] for _, y in shards] == [[0, 1], [2], [3]]


def test_a_batch_of_one_row_decides_nothing_for_the_following():
    def batch(boxes: int) -> Any:
        return images(1), [{"boxes": torch.zeros(boxes, 4), "labels": torch.zeros(boxes)}]

    layout = ListReader()
    found = [split_batch(batch(boxes), 1, layout)[0][1] for boxes in (1, 2)]

    assert [[len(target["boxes"]) for target in targets] for targets in found] == [[1], [2]]


def test_sequences_of_many_lengths_names_and_objects_keep_to_their_rows():
    marker = [object() for _ in range(4)]
    batch = {
        "tokens": [torch.arange(row + 2) for row in range(4)],
        "name": ("a", "b", "c", "d"),
        "graph": marker,
        "number": [10, 20, 30, 40],
        "score": torch.arange(4.0),
    }
    for replica, rows in enumerate(((0, 1), (2,), (3,))):
        shard = split_batch(batch, 3)[replica]
        assert [len(each) for each in shard["tokens"]] == [row + 2 for row in rows]
        assert list(shard["name"]) == ["abcd"[row] for row in rows]
        assert all(got is marker[row] for got, row in zip(shard["graph"], rows, strict=True))
        assert shard["number"] == [10 * (row + 1) for row in rows]
        assert isinstance(shard["name"], tuple)
        assert isinstance(shard["number"], list)


def test_columns_in_lists_and_tuples_stay_columns():
    first, second = split_batch(((torch.ones(4, 2), torch.ones(4, 3)), torch.ones(4)), 2)
    assert [tuple(each.shape) for each in first[0]] == [(2, 2), (2, 3)]
    assert second[1].shape == (2,)
    pair = split_batch([[torch.ones(5, 2), [torch.ones(5), torch.ones(5, 1)]], torch.ones(5, dtype=torch.int64)], 2)
    assert [len(each) for each in pair[1][0][1]] == [2, 2]


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((images(3), torch.ones(3)), id="as many images as they have channels"),
        pytest.param(((torch.ones(2), torch.zeros(2)), torch.ones(2)), id="two columns of two rows"),
        pytest.param({"features": [{"a": torch.ones(2, 5)}, {"a": torch.ones(2, 7)}], "y": torch.ones(2)}, id="dicts"),
        pytest.param(images(4), id="a list alone"),
        pytest.param(images(2), id="two images alone"),
        pytest.param([torch.ones(2, 5), torch.ones(2, 5)], id="as many alike as they have rows"),
        pytest.param([torch.ones(4, 5), torch.ones(3, 5)], id="two of other lengths"),
        pytest.param(tuple(images(4)), id="a long tuple"),
        pytest.param([(image, 1) for image in images(4)], id="uncollated"),
        pytest.param([{"x": image} for image in images(4)], id="uncollated dicts"),
        pytest.param(([torch.ones(5)] * 4, [torch.ones(5)] * 4), id="nothing says how many rows"),
        pytest.param({"x": torch.ones(2, 4), "size": (224, 224)}, id="height and width"),
        pytest.param(Pair([torch.ones(2)] * 2, torch.ones(2)), id="named tuple"),
    ],
)
def test_what_could_be_both_is_refused_with_what_says_it(batch: Any):
    with pytest.raises(DataError) as raised:
        split_batch(batch, 2)
    assert all(word in str(raised.value) for word in ("torch.stack", 'lists="rows"', 'lists="columns"'))


def test_a_list_of_x_and_y_of_equal_shape_is_columns_and_so_are_the_lists_after_it():
    layout = ListReader()
    x = torch.arange(20.0).reshape(4, 5)
    first, second = split_batch([x, -x], 2, layout)
    assert torch.equal(first[0], x[:2])
    assert torch.equal(second[1], -x[2:])
    last = split_batch([x[:2], -x[:2]], 2, layout)
    assert [shard[1].tolist() for shard in last] == [[row] for row in (-x[:2]).tolist()]


def test_told_rows_and_columns():
    rows, columns = ListReader("rows"), ListReader("columns")
    assert firsts(split_batch(images(4), 2, rows)) == [[0, 1], [2, 3]]
    assert firsts(x for x, _ in split_batch((images(3), torch.ones(3)), 2, rows)) == [[0, 1], [2]]
    assert [len(x) for x, _ in split_batch(((torch.ones(2), torch.ones(2)), torch.ones(2)), 2, columns)] == [2, 2]
    assert [tuple(each.shape) for each in split_batch([torch.ones(4, 5)] * 2, 2, columns)[1]] == [(2, 5)] * 2
    uncollated = [(image, label) for label, image in enumerate(images(4))]
    assert [[label for _, label in shard] for shard in split_batch(uncollated, 2, rows)] == [[0, 1], [2, 3]]
    assert split_batch({"x": torch.ones(2, 4), "size": (224, 224)}, 2, columns)[1]["size"] == (224, 224)
    with pytest.raises(ConfigError, match="lists"):
        ListReader("both")  # type: ignore[arg-type]


def test_what_a_batch_has_shown_holds_for_those_after_it():
    layout = ListReader()
    split_batch({"x": torch.ones(4, 2), "pair": (torch.ones(4), torch.zeros(4)), "size": [9, 9]}, 2, layout)
    last = split_batch({"x": torch.ones(2, 2), "pair": (torch.ones(2), torch.zeros(2)), "size": [9, 9]}, 2, layout)
    assert [len(shard["pair"]) for shard in last] == [2, 2]
    assert last[1]["size"] == [9, 9]
    layout = ListReader()
    split_batch((images(4), torch.ones(4)), 2, layout)
    assert firsts(x for x, _ in split_batch((images(3), torch.ones(3)), 2, layout)) == [[0, 1], [2]]


def test_a_list_that_had_one_item_a_row_and_has_not_now_is_refused():
    layout = ListReader()
    split_batch({"x": torch.ones(4), "classes": ["a", "b", "c", "d"]}, 2, layout)
    with pytest.raises(DataError) as raised:
        split_batch({"x": torch.ones(3), "classes": ["a", "b", "c", "d"]}, 2, layout)
    assert all(word in str(raised.value) for word in ('batch["classes"]', "4 items", "3 rows", "leave"))


class Detection(Dataset[Any]):
    """Images of one size, as many boxes in each as there are channels."""

    def __getitem__(self, index: int) -> Any:
        return images(7)[index], {"boxes": torch.full((3, 4), float(index)), "labels": torch.full((3,), index)}

    def __len__(self) -> int:
        return 7


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "a list of samples": lambda rows: rows,
    "a tuple of tuples": lambda rows: tuple(zip(*rows, strict=True)),
    "a list of lists": lambda rows: [list(each) for each in zip(*rows, strict=True)],
    "images alone": lambda rows: [image for image, _ in rows],
    "a dict": lambda rows: {"image": [image for image, _ in rows], "target": [target for _, target in rows]},
}


def rows_of(name: str, batch: Any) -> list[float]:
    """The number of each row, by its image."""
    if name == "a list of samples":
        batch = [image for image, _ in batch]
    elif name == "a dict":
        assert [float(each["boxes"][0, 0]) for each in batch["target"]] == firsts([batch["image"]])[0]
        batch = batch["image"]
    elif name != "images alone":
        assert [float(each["boxes"][0, 0]) for each in batch[1]] == firsts([batch[0]])[0]
        batch = batch[0]
    return firsts([batch])[0]


# With lists="rows" the root of the other is taken for rows.
TOLD = [name for name in COLLATES if name != "a list of lists"]


@pytest.mark.parametrize("name", TOLD)
def test_batches_of_lists_are_divided_when_told_that_these_are_rows(make_strategy, name: str):
    loader = DataLoader(Detection(), batch_size=4, collate_fn=COLLATES[name])
    expected = [rows_of(name, batch) for batch in loader]
    strategy = make_strategy(3)
    found = []
    for batch in strategy.distribute_dataset(loader, lists="rows"):
        shards = strategy.local_results(strategy.run(lambda shard: ls.PerReplica([rows_of(name, shard)]), (batch,)))
        found.append([row for shard in shards for row in shard[0]])
    assert found == expected


@pytest.mark.parametrize("name", COLLATES)
def test_as_many_images_as_channels_are_refused(make_strategy, name: str):
    loader = DataLoader(Detection(), batch_size=3, collate_fn=COLLATES[name])
    with pytest.raises(DataError, match="lists="):
        list(make_strategy(2).distribute_dataset(loader))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_torch_collates_are_columns(make_strategy, replicas: int):
    class Named(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), index), (torch.full((2,), index), torch.zeros(2, dtype=torch.int64)), f"row {index}"

        def __len__(self) -> int:
            return 5

    strategy = make_strategy(replicas)
    found: list[tuple[int, str]] = []
    for batch in strategy.distribute_dataset(DataLoader(Named(), batch_size=2)):
        for x, (a, b), names in strategy.local_results(batch):
            assert len(x) == len(a) == len(b) == len(names)
            found += zip(x[:, 0].tolist(), names, strict=True)
    assert found == [(row, f"row {row}") for row in range(5)]
    data = TensorDataset(torch.arange(6), torch.arange(6))
    pairs = list(strategy.distribute_dataset(DataLoader(data, batch_size=2)))
    assert [len(each) for pair in pairs for x in pair for each in x] == [
        len(each) for _ in range(6) for each in torch.arange(2).tensor_split(replicas)
    ]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for step in range(2):
            yield torch.full((4, 3), step), torch.full((4, 3), step)


def test_a_stream_of_pairs_gives_pairs(make_strategy):
    strategy = make_strategy(2)
    for x, y in strategy.distribute_dataset(DataLoader(Stream(), batch_size=None)):
        assert [tuple(each.shape) for each in (*x, *y)] == [(2, 3)] * 4


class Images(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield images(5)


def test_a_stream_of_lists_of_images_is_refused(make_strategy):
    with pytest.raises(DataError, match="lists="):
        list(make_strategy(2).distribute_dataset(DataLoader(Images(), batch_size=None)))


def test_records_are_rows_where_that_is_said():
    labels = [{"boxes": torch.full((2, 4), row)} for row in range(2)]
    shards = split_batch({"x": torch.ones(2, 3), "labels": labels}, 2, ListReader(records_are_rows=True))
    assert [[int(label["boxes"][0, 0]) for label in shard["labels"]] for shard in shards] == [[0], [1]]


@dataclass
class Fields:
    x: Tensor


def test_other_objects_are_refused_by_their_type_outside_lists_of_rows():
    pandas = pytest.importorskip("pandas")
    for odd in (Fields(torch.ones(4)), pandas.DataFrame({"x": [1, 2, 3, 4]}), {1, 2, 3, 4}):
        with pytest.raises(DataError) as raised:
            split_batch({"odd": odd, "y": torch.ones(4)}, 2)
        assert all(word in str(raised.value) for word in ('batch["odd"]', type(odd).__name__, "collate_fn"))
    rows = [Fields(torch.ones(row)) for row in range(4)]
    assert [len(shard["rows"]) for shard in split_batch({"rows": rows, "y": torch.ones(4)}, 2)] == [2, 2]


class Pooled(nn.Module):
    """A module that takes a list of sequences of many lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        pooled = torch.stack([each.mean(0) for each in sequences])
        out: Tensor = self.last(pooled)
        return out


def ragged(rows: int, seed: int) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (rows,), generator=random).tolist()
    x = [torch.randn(length, 4, dtype=torch.float64, generator=random) for length in lengths]
    return x, torch.randint(0, 2, (rows,), generator=random)


def compiled(strategy: ls.Strategy, module: nn.Module, loss: Any) -> ls.Model:
    with strategy.scope():
        model = ls.Model(module)
        model.compile(optimizer=sgd, loss=loss)
    return model


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_fit_evaluate_and_predict_on_lists_of_sequences_equal_one_device(make_strategy, replicas: int):
    data = [ragged(rows, seed) for seed, rows in enumerate((6, 5, 3, 9))]
    trained = Pooled().double()
    alone = train(copy.deepcopy(trained), data).module
    model = compiled(make_strategy(replicas), trained, F.cross_entropy)
    model.fit(data, epochs=1, verbose=0)
    assert_close(trained, alone)
    outputs = torch.cat([alone(x) for x, _ in data]).detach()
    assert_close(model.predict(data), outputs)
    expected = F.cross_entropy(outputs, torch.cat([y for _, y in data])).item()
    assert model.evaluate(data, verbose=0)["loss"] == pytest.approx(expected, rel=1e-6)


def test_fit_takes_lists_of_two_alike_as_inputs_and_targets(make_strategy):
    x, trained = torch.randn(6, 3, dtype=torch.float64), nn.Linear(3, 3).double()
    alone = train(copy.deepcopy(trained), [(x, x)], loss=F.mse_loss).module
    compiled(make_strategy(2), trained, F.mse_loss).fit([[x, x]], epochs=1, verbose=0)
    assert_close(trained, alone)


def test_split_batches_keep_their_lists(make_strategy):
    strategy = make_strategy(2)
    batches = [(images(2), ["a", "b"], torch.ones(2)), (images(1), ["c"], torch.ones(1))]
    (batch,) = strategy.distribute_datasets_from_function(lambda _: batches)
    assert [[len(each) for each in shard] for shard in strategy.local_results(batch)] == [[2, 2, 2], [1, 1, 1]]


def test_a_list_of_rows_is_a_list_to_the_step_and_to_tree_map():
    (shard,) = split_batch((images(4), torch.ones(4)), 1)
    assert isinstance(shard[0], list)
    mapped = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, shard)
    assert firsts([mapped[0]]) == [[0, 2, 4, 6]]


def test_an_empty_shard_has_an_empty_list():
    assert [len(x) for x, _ in split_batch((images(2), torch.ones(2, 1)), 3, ListReader("rows"))] == [1, 1, 0]


def test_a_list_of_arrays_is_one_of_rows_too():
    batch = ([np.ones((5, row + 1)) for row in range(4)], np.arange(4))
    assert [[each.shape[1] for each in x] for x, _ in split_batch(batch, 2)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(8, 2), torch.ones(7, 2)),
        [torch.ones(8, 2), torch.ones(7, 2)],
        {"x": torch.ones(8, 2), "y": [torch.ones(5), torch.ones(6)]},
        {"x": torch.ones(8, 2), "y": [object(), object()]},
    ],
)
def test_a_mistake_is_no_list_of_rows(batch: Any):
    with pytest.raises(DataError):
        split_batch(batch, 2)


def shards_of(
    workers: Communicator, make: Callable[[Communicator], Iterable[Any]], devices: Any, **named: Any
) -> list[Any]:
    own = devices[: workers.replicas[workers.index]]
    data = DistributedDataset(make(workers), own, workers=workers, **named)
    return [[select(batch, replica, len(own)) for replica in range(len(own))] for batch in data]


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("whole", [False, True])
def test_several_workers_cut_lists_as_one_does(split_cpu, run_workers, name: str, whole: bool):
    def make(_: Communicator) -> Iterable[Any]:
        loader = DataLoader(Detection(), batch_size=4, collate_fn=COLLATES[name])
        return list(loader) if whole else loader

    found = run_workers((1, 2), partial(shards_of, lists="rows"), make, split_cpu(2))
    batches = list(make(SingleWorkerCommunicator(1)))
    for number, batch in enumerate(batches):
        parts = [shard for of_worker in found for shard in of_worker[number]]
        assert [row for part in parts for row in rows_of(name, part)] == rows_of(name, batch)
        assert [len(rows_of(name, part)) for part in parts] == ([2, 1, 1] if number == 0 else [1, 1, 1])


def test_a_worker_whose_data_has_ended_gets_empty_lists(split_cpu, run_workers):
    def make(workers: Communicator) -> Iterable[Any]:
        return [(images(3, 4), ("a", "b", "c"), torch.ones(3, 1))] * (2 - workers.index)

    found = run_workers((2, 2), partial(shards_of, shard="off", lists="rows"), make, split_cpu(2))
    assert [[[len(each) for each in shard] for shard in of_worker[1]] for of_worker in found] == [
        [[2, 2, 2], [1, 1, 1]],
        [[0, 0, 0], [0, 0, 0]],
    ]
    assert isinstance(found[1][1][0][0], list)
    assert isinstance(found[1][1][0][1], tuple)
