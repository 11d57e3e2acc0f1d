"""A batch of another mapping than dict, or of a class derived from list or tuple, is of that type in each replica too,
with its attributes."""

from __future__ import annotations

import datetime
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from tests.data.conftest import RunWorkers
from torch import Tensor, nn

import lockstep as ls
from lockstep.collectives.per_replica import select
from lockstep.data.dataset import DistributedDataset
from lockstep.errors import DataError

X, Y = torch.arange(35.0).reshape(7, 5).sin(), torch.arange(7) % 3


class Attributes(dict[str, Any]):
    """A dict with attributes."""

    __getattr__ = dict.__getitem__


class Wrapped(UserDict[str, Any]):
    """As transformers' BatchEncoding and Detectron's samples are made."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]

    def rows(self) -> int:
        return len(self.x)


class Fields(dict[str, Any]):
    """Takes no dict."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x, y=y)


class Forgetful(dict[str, Any]):
    """Takes a dict, and has other keys."""

    def __init__(self, items: Any) -> None:
        super().__init__(x=items["x"])


def factory(items: dict[str, Any]) -> defaultdict[str, Any]:
    return defaultdict(list, items)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("make", [Attributes, Wrapped])
def test_a_loop_reads_attributes(make_strategy: MakeStrategy, make: Callable[..., Any], replicas: int):
    strategy = make_strategy(replicas)

    def step(batch: Any) -> Tensor:
        assert type(batch) is make
        return ls.compute_average_loss(F.cross_entropy(batch.x[:, :3], batch.y, reduction="none"))

    for rows in (7, 2):  # of 2 rows the third replica gets none
        (batch,) = strategy.distribute_dataset([make({"x": X[:rows], "y": Y[:rows]})])
        assert sum(len(value) for value in batch["x"]) == rows
        loss = strategy.reduce("sum", strategy.run(step, (batch,)))
        torch.testing.assert_close(loss, F.cross_entropy(X[:rows, :3], Y[:rows]))


@pytest.mark.parametrize("make", [OrderedDict, factory, Wrapped])
def test_it_may_stand_in_other_structures(make_strategy: MakeStrategy, make: Callable[..., Any]):
    strategy, kind = make_strategy(2), type(make({}))

    def step(batch: Any) -> int:
        inner = batch[0]["inner"]
        assert type(inner) is kind
        if isinstance(inner, defaultdict):
            assert inner["none"] == []
        return len(inner["x"]) + len(batch[1])

    (batch,) = strategy.distribute_dataset([({"inner": make({"x": X})}, Attributes({"a": Y}))])

    assert strategy.run(step, (batch,)).values == (5, 4)


@pytest.mark.parametrize("kind", [Fields, Forgetful])
def test_a_type_that_cannot_be_made_is_named(make_strategy: MakeStrategy, kind: type):
    batch = Fields(X, Y) if kind is Fields else Attributes({"x": X, "y": Y})
    batch.__class__ = kind
    with pytest.raises(DataError, match=rf"is a {kind.__name__}.*dict\(batch\)"):
        next(iter(make_strategy(2).distribute_dataset([batch])))


def test_fit_calls_the_module_with_its_items(make_strategy: MakeStrategy):
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def trained(strategy: ls.Strategy, batch: Any) -> Tensor:
        torch.manual_seed(0)
        with strategy.scope():
            net = Net(5, 3)
            model = ls.Model(net)
            model.compile(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
        model.fit([batch] * 3, verbose=0)
        return net.weight.detach()

    expected = trained(make_strategy(1), ({"x": X}, Y))
    torch.testing.assert_close(trained(make_strategy(2), (Wrapped({"x": X}), Y)), expected)


def test_a_step_sees_an_empty_shard_in_it(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    (batch,) = strategy.distribute_dataset([Wrapped({"x": X[:2], "y": Y[:2]})])
    assert strategy.run(lambda batch: ls.has_rows(batch), (batch,)).values == (True, True, False)


def test_a_batch_encoding_has_its_methods(make_strategy: MakeStrategy):
    transformers = pytest.importorskip("transformers")
    strategy = make_strategy(2)

    def step(batch: Any) -> int:
        assert type(batch) is transformers.BatchEncoding
        return len(batch.to("cpu").input_ids)

    (batch,) = strategy.distribute_dataset([transformers.BatchEncoding({"input_ids": X, "labels": Y})])
    assert strategy.run(step, (batch,)).values == (4, 3)


def test_a_tensordict_has_its_rows(make_strategy: MakeStrategy):
    tensordict = pytest.importorskip("tensordict")
    strategy = make_strategy(2)

    def step(batch: Any) -> tuple[int, int]:
        assert batch["inner"].batch_size == batch.batch_size
        return len(batch), len(batch[0]["x"])

    inner = tensordict.TensorDict({"y": Y}, batch_size=[7])
    (batch,) = strategy.distribute_dataset([tensordict.TensorDict({"x": X, "inner": inner}, batch_size=[7])])
    rows, columns = strategy.run(step, (batch,))
    assert (rows.values, columns) == ((4, 3), 5)


class Task(dict[str, Any]):
    """Has attributes of a constructor, one of which follows from the items, and one that is computed when read."""

    def __init__(self, items: Any = (), task: str = "classes") -> None:
        super().__init__(items)
        self.task, self.number = task, len(self["x"])

    @cached_property
    def total(self) -> float:
        return float(self["x"].sum())


class Marked(UserDict[str, Any]):
    task = "classes"


class Stored(MutableMapping[str, Any]):
    """Keeps its items itself."""

    def __init__(self, items: Any = (), task: str = "classes") -> None:
        self._items, self.task = dict(items), task

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Columns(list[Any]):
    task = "classes"


class Fixed(tuple[Any, ...]):
    task = "classes"


class Pair(NamedTuple):
    x: Any
    y: Any


class MarkedPair(Pair):
    task = "classes"


def with_task(batch: Any) -> Any:
    batch.task = "values"
    return batch


BATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "a dict": lambda x, y: Task({"x": x, "y": y}, task="values"),
    "a UserDict": lambda x, y: with_task(Marked({"x": x, "y": y})),
    "a mapping": lambda x, y: Stored({"x": x, "y": y}, task="values"),
    "a list": lambda x, y: with_task(Columns([x, y])),
    "a tuple": lambda x, y: with_task(Fixed([x, y])),
    "a named tuple": lambda x, y: with_task(MarkedPair(x, y)),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("make", BATCHES)
def test_attributes_of_a_batch_reach_every_replica(
    make_strategy: MakeStrategy, make: str, replicas: int, nested: bool
) -> None:
    strategy = make_strategy(replicas)

    def step(batch: Any) -> tuple[str, str, int]:
        inner = batch["inner"][0] if nested else batch
        rows = len(inner[0] if isinstance(inner, (list, tuple)) else inner["x"])
        assert ls.has_rows(batch) == (rows > 0)
        return type(inner).__name__, inner.task, rows

    for rows in (7, 2):
        given = BATCHES[make](X[:rows], Y[:rows])
        (batch,) = strategy.distribute_dataset([{"inner": (given, 1)} if nested else given])
        kinds, tasks, numbers = map(strategy.local_results, strategy.run(step, (batch,)))
        assert set(kinds) == {type(given).__name__}
        assert set(tasks) == {"values"}
        assert sum(numbers) == rows


class Cloned(Stored):
    """Copies its items, so that what it keeps is not the same object as an item."""

    def __init__(self, items: Any) -> None:
        super().__init__({key: value.clone() if isinstance(value, Tensor) else value for key, value in items.items()})
        self.made = datetime.date(2020, 1, 1)


def test_items_that_a_constructor_copies_are_no_attributes(make_strategy: MakeStrategy) -> None:
    given = Cloned({"x": torch.full((7, 5), torch.nan), "y": Y})
    given.made = datetime.date(2020, 1, 2)
    (batch,) = make_strategy(2).distribute_dataset([given])
    sizes, days = make_strategy(2).run(lambda shard: (len(shard["x"]), shard.made.day), (batch,))
    assert (sizes.values, days) == ((4, 3), 2)


def test_workers_with_fewer_batches_get_an_empty_one_of_its_type(run_workers: RunWorkers, split_cpu: Any) -> None:
    def kinds(workers: Any) -> list[Any]:
        batches = [with_task(Marked({"x": X, "y": Y}))] * (1 + workers.index)
        data = DistributedDataset(batches, split_cpu(2), workers=workers, shard="off")
        shards = [select(batch, replica, 2) for batch in data for replica in range(2)]
        return [(type(shard).__name__, shard.task, len(shard["x"])) for shard in shards]

    first, second = run_workers([2, 2], kinds)

    assert first == [("Marked", "values", 4), ("Marked", "values", 3), *[("Marked", "values", 0)] * 2]
    assert second == [("Marked", "values", 4), ("Marked", "values", 3)] * 2


def test_what_follows_from_the_items_is_the_shard_s(make_strategy: MakeStrategy) -> None:
    batch = Task({"x": X, "y": Y})
    assert batch.total != 0
    (distributed,) = make_strategy(2).distribute_dataset([batch])
    numbers = make_strategy(2).run(lambda shard: (shard.number, shard.total), (distributed,))
    assert numbers[0].values == (4, 3)
    assert sum(numbers[1].values) == pytest.approx(batch.total, abs=1e-5)


def test_each_replica_has_the_attributes_of_its_batch(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(2)
    batches = [Task({"x": X + index}, task=f"number {index}") for index in range(2)]
    (batch,) = strategy.distribute_datasets_from_function(lambda _: batches)
    assert strategy.run(lambda shard: shard.task, (batch,)).values == ("number 0", "number 1")


def test_a_tensor_with_rows_among_the_attributes_is_warned_of(make_strategy: MakeStrategy) -> None:
    batch, other = Marked({"x": X, "y": Y}), Marked({"x": X, "y": Y})
    batch.weights, other.weights = torch.ones(7), torch.ones(3)
    with pytest.warns(UserWarning, match=r"of 7 rows is a Marked whose attributes weights .* batch\['weights'\]"):
        list(make_strategy(2).distribute_dataset([batch]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(make_strategy(2).distribute_dataset([other]))
        list(make_strategy(1).distribute_dataset([batch]))


class OfTwo(list[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__([x, y])


def test_a_list_that_cannot_be_made_is_named(make_strategy: MakeStrategy) -> None:
    with pytest.raises(DataError, match=r"is a OfTwo.*OfTwo\(a list\) raises TypeError.*list\(batch\)"):
        next(iter(make_strategy(2).distribute_dataset([OfTwo(X, Y)])))


def test_a_list_of_rows_that_becomes_a_plain_one_is_warned_of(make_strategy: MakeStrategy) -> None:
    names = Columns([f"row {row}" for row in range(7)])
    with pytest.warns(UserWarning, match="a Columns of one item a row, and each replica gets a list"):
        (batch,) = make_strategy(2).distribute_dataset([{"x": X, "names": names}])
    assert make_strategy(2).run(lambda shard: shard["names"][0], (batch,)).values == ("row 0", "row 4")


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_batch_encoding_has_the_encodings_of_its_rows(make_strategy: MakeStrategy, replicas: int) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "[PAD]", *"abcdefg"]
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")
    texts = [" ".join("abcdefg"[: 1 + row % 4]) for row in range(7)]
    strategy = make_strategy(replicas)

    def step(batch: Any) -> None:
        assert batch.is_fast
        assert batch.n_sequences == 1
        for row, ids in enumerate(batch["input_ids"].tolist()):
            assert batch[row].ids == ids
            assert batch.word_ids(row) == [None if index == 1 else column for column, index in enumerate(ids)]
        with pytest.raises(IndexError):
            batch.word_ids(len(batch["input_ids"]))

    for rows in (7, max(replicas, 2)):
        (batch,) = strategy.distribute_dataset([tokenizer(texts[:rows], padding=True, return_tensors="pt")])
        strategy.run(step, (batch,))
