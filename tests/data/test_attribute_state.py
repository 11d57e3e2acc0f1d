"""Data that goes on at a saved position has the order of data that was never left, whatever the order follows from.

What cannot be saved is named by a warning when the position is saved.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import random
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.oracle import vectors
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lockstep.checkpoint.format import flatten, unflatten
from lockstep.data.attribute_state import SourceAttributes
from lockstep.data.dataset import DistributedDataset
from lockstep.errors import DataError

ROWS, BATCH = 20, 6
SHARED = random.Random()
COUNTS = {"epochs": 0}
epochs_begun = 0


def sampler(rows: Callable[[Any], Iterator[int]], **state: Any) -> Any:
    """A sampler whose ``__iter__`` is ``rows``, with these attributes, and a class of its own that counts too."""
    methods = {"__iter__": rows, "__len__": lambda self: ROWS, "epochs": 0}
    instance = type(rows.__name__, (Sampler,), methods)()
    vars(instance).update(state)
    return instance


def order_of(seed: int) -> Iterator[int]:
    return iter(random.Random(seed).sample(range(ROWS), ROWS))


def shuffled_by(*generators: Any) -> Iterator[int]:
    order = list(range(ROWS))
    for rng in generators:
        rng.shuffle(order)
    return iter(order)


def by_rng(self: Any) -> Iterator[int]:
    return shuffled_by(self.rng)


def in_place(self: Any) -> Iterator[int]:
    """Shuffles one list again and again, with numbers that begin anew in each epoch."""
    random.Random(3).shuffle(self.order)
    return iter(list(self.order))


def permuted(self: Any) -> Iterator[int]:
    """The same with an array."""
    self.array[...] = self.array[np.random.default_rng(3).permutation(len(self.array))]
    return iter([int(row) for row in self.array[:ROWS]])


def by_epoch(self: Any) -> Iterator[int]:
    """Counts its epochs, at the end of each."""
    yield from order_of(self.epoch)
    self.epoch += 1


def by_class(self: Any) -> Iterator[int]:
    type(self).epochs += 1
    return order_of(self.epochs)


def late(self: Any) -> Iterator[int]:
    """Makes its generator when it is first used."""
    self.rng = self.rng or np.random.default_rng(5)
    return shuffled_by(self.rng)


def in_containers(self: Any) -> Iterator[int]:
    """Draws from generators in a list of dicts, beside which a number changes."""
    order = [*shuffled_by(*self.streams[0]["rngs"])]
    self.streams[0]["drawn"] += 1
    return iter(order[self.streams[0]["drawn"] :] + order[: self.streams[0]["drawn"]])


class Slots(Sampler[int]):
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = itertools.count(2)

    def __iter__(self) -> Iterator[int]:
        return order_of(next(self.count))

    def __len__(self) -> int:
        return ROWS


class Told(Sampler[int]):
    """Holds its state where nobody sees it, and tells it."""

    def __init__(self) -> None:
        self.hidden = bytearray(1)

    def __iter__(self) -> Iterator[int]:
        self.hidden[0] += 1
        return order_of(self.hidden[0])

    def __len__(self) -> int:
        return ROWS

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.hidden[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.hidden[0] = state["epoch"]


class Buckets(Sampler[list[int]]):
    """Batches from buckets, each with a pointer, that are visited in an order drawn by a nested sampler's generator."""

    def __init__(self) -> None:
        self.buckets = [Bucket(range(10)), Bucket(range(10, ROWS))]
        self.inner = {"order": sampler(by_rng, rng=np.random.RandomState(3))}

    def __iter__(self) -> Iterator[list[int]]:
        for index in itertools.islice(self.inner["order"], 4):
            yield self.buckets[index % 2].take(5)

    def __len__(self) -> int:
        return 4


class Bucket:
    def __init__(self, rows: Iterable[int]) -> None:
        self.rows, self.pointer = list(rows), 0

    def take(self, number: int) -> list[int]:
        taken = [self.rows[(self.pointer + step) % len(self.rows)] for step in range(number)]
        self.pointer += number - 1
        return taken


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that depend on ``noise``, which is called for each."""

    def __init__(self, noise: Callable[[], float] = float) -> None:
        ((self.x, self.y),) = vectors((ROWS,))
        self.noise = noise

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.noise(), self.y[index]

    def __len__(self) -> int:
        return ROWS


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream whose order depends on how often it was read."""

    def __init__(self) -> None:
        self.rows, self.reads = Rows(), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.reads += 1
        yield from (self.rows[index] for index in order_of(self.reads))


class ToldStream(Stream):
    """The same, and it goes on at the very row."""

    def __init__(self) -> None:
        super().__init__()
        self.row = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = [*order_of(self.reads)]
        while self.row < ROWS:
            self.row += 1
            yield self.rows[order[self.row - 1]]
        self.row, self.reads = 0, self.reads + 1

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row, "reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row, self.reads = state["row"], state["reads"]


class Batches:
    """No class of torch's."""

    def __init__(self) -> None:
        self.loader = DataLoader(Rows(), BATCH, sampler=sampler(by_rng, rng=random.Random(1)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Collate:
    """Adds noise that it draws itself."""

    def __init__(self) -> None:
        self.rng = None

    def __call__(self, rows: Any) -> Any:
        self.rng = self.rng or random.Random(9)
        return default_collate([(x + self.rng.random(), y) for x, y in rows])


def closure() -> Callable[[Any], Any]:
    step = 0

    def collate(rows: Any) -> Any:
        nonlocal step
        step += 1
        return default_collate([(x * step, y) for x, y in rows])

    return collate


def by_shared(self: Any) -> Iterator[int]:
    """Draws from a generator of its module, as one script's sampler and augmentation do."""
    return iter(SHARED.sample(range(ROWS), ROWS))


def by_module(self: Any) -> Iterator[int]:
    """Counts epochs in its module."""
    global epochs_begun
    epochs_begun += 1
    return order_of(epochs_begun)


def by_item(self: Any) -> Iterator[int]:
    COUNTS["epochs"] += 1
    return order_of(COUNTS["epochs"])


def collate_by_module(rows: Any) -> Any:
    return default_collate([(x * SHARED.randint(1, 100), y) for x, y in rows])


def by_factory(self: Any) -> Iterator[int]:
    """Counts in a dict with a default."""
    self.counts["epochs"] += 1
    return order_of(self.counts["epochs"])


def counts(factory: Callable[[], int]) -> defaultdict[str, int]:
    epochs = defaultdict(factory)
    assert epochs["epochs"] in (0, 3)
    return epochs


class Streams(NamedTuple):
    order: random.Random
    offset: int


def in_fields(self: Any) -> Iterator[int]:
    """Draws from generators in a named tuple and in a dict whose keys are tuples."""
    return shuffled_by(self.streams.order, self.by_key[0, "a"])


def by_weights(self: Any) -> Iterator[int]:
    """Changes a parameter in place."""
    self.weights[:3] *= 2
    generator = torch.Generator().manual_seed(int(self.weights[0]))
    return iter(torch.multinomial(self.weights, ROWS, True, generator=generator).tolist())


class Module(nn.Module):
    """Counts in buffers: one that changes, and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epochs", torch.zeros((), dtype=torch.long))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        self.rows = self.rows + ROWS
        return order_of(int(self.epochs + self.rows))

    def __len__(self) -> int:
        return ROWS


def batches_of_closure() -> Any:
    epochs = [0]

    class Closure:
        def __iter__(self) -> Iterator[Any]:
            epochs[0] += 1
            return iter(sampled(by_rng, rng=random.Random(epochs[0])))

    return Closure()


def shifted(value: Tensor) -> Tensor:
    return value + noise()


def noise() -> float:
    return SHARED.random()


class Calling(Rows):
    """Calls a function that calls one that draws."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return shifted(x), y


def sampled(rows: Callable[[Any], Iterator[int]], **state: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), BATCH, sampler=sampler(rows, **state))


SOURCES: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: sampled(by_rng, rng=random.Random(7)),
    "RandomState": lambda: sampled(by_rng, rng=np.random.RandomState(7)),
    "numpy Generator": lambda: sampled(by_rng, rng=np.random.default_rng(7)),
    "a generator made late": lambda: sampled(late, rng=None),
    "generators in containers": lambda: sampled(
        in_containers, streams=[{"rngs": (random.Random(7), np.random.default_rng(7)), "drawn": 0}]
    ),
    "Python's own": lambda: sampled(by_rng, rng=random),
    "a list": lambda: sampled(in_place, order=list(range(ROWS))),
    "an array": lambda: sampled(permuted, array=np.arange(ROWS)),
    "a large tensor": lambda: sampled(permuted, array=torch.arange(20_000) % ROWS),
    "an epoch counter": lambda: sampled(by_epoch, epoch=0),
    "a counter of the class": lambda: sampled(by_class, rng=None),
    "a generator of the module": lambda: sampled(by_shared, rng=None),
    "a counter of the module": lambda: sampled(by_module, rng=None),
    "a collator with a generator of the module": lambda: DataLoader(Rows(), BATCH, collate_fn=collate_by_module),
    "a generator of the module alone": lambda: sampled(by_shared),
    "a counter of the class alone": lambda: sampled(by_class),
    "a counter of the module alone": lambda: sampled(by_module),
    "an item of the module": lambda: sampled(by_item),
    "a dict with a default": lambda: sampled(by_factory, counts=counts(int)),
    "a dict with a function's default": lambda: sampled(by_factory, counts=counts(lambda: 3)),
    "generators in fields": lambda: sampled(
        in_fields, streams=Streams(random.Random(3), 1), by_key={(0, "a"): random.Random(4)}
    ),
    "a parameter": lambda: sampled(by_weights, weights=nn.Parameter(torch.ones(ROWS), requires_grad=False)),
    "buffers": lambda: DataLoader(Rows(), BATCH, sampler=Module()),  # type: ignore[arg-type]
    "a class in a closure": batches_of_closure,
    "rows that call a function": lambda: DataLoader(Calling(), BATCH),
    "a count in a slot": lambda: DataLoader(Rows(), BATCH, sampler=Slots()),
    "state_dict": lambda: DataLoader(Rows(), BATCH, sampler=Told()),
    "buckets": lambda: DataLoader(Rows(), batch_sampler=Buckets()),
    "a nested sampler": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(sampler(by_rng, rng=random.Random(2)), BATCH, False)
    ),
    "rows that draw": lambda: DataLoader(Rows(random.Random(4).random), BATCH),
    "a collator that draws": lambda: DataLoader(Rows(), BATCH, collate_fn=Collate()),
    "a closure": lambda: DataLoader(Rows(), BATCH, collate_fn=closure()),
    "processes": lambda: DataLoader(Rows(), BATCH, sampler=sampler(by_rng, rng=random.Random(7)), num_workers=1),
    "a stream": lambda: DataLoader(Stream(), BATCH),
    "a stream with a state": lambda: DataLoader(ToldStream(), BATCH),
    "batches": Batches,
}
UNCHANGED = ("an epoch counter", "a counter of the module", "a counter of the module alone")

Position = dict[str, Any]


def stored(position: Position) -> Position:
    """A position as a checkpoint gives it back."""
    tree, tensors = flatten(position)
    return unflatten(json.loads(json.dumps(tree)), tensors)


def read(data: DistributedDataset, epochs: int, *, save_at: tuple[int, int] | None = None) -> tuple[list[Any], Any]:
    """The batches of some epochs, and the position after a batch of one; batch -1 is the end of the epoch."""
    batches, position = [], None
    for epoch in range(epochs):
        for number, batch in enumerate(data):
            batches.append([torch.cat(list(leaf)).tolist() for leaf in batch])
            if (epoch, number) == save_at:
                position = stored(data.state_dict())
        if (epoch, -1) == save_at:
            position = stored(data.state_dict())
    return batches, position


def make(source: str) -> Any:
    global epochs_begun
    SHARED.seed(8)
    epochs_begun = COUNTS["epochs"] = 0
    return SOURCES[source]()


def seed() -> None:
    random.seed(5)
    torch.manual_seed(6)


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("at", [(1, -1), (1, 1), (0, 2), (0, -1)])
@pytest.mark.parametrize("source", SOURCES)
def test_what_comes_next_is_what_would_have_come(
    split_cpu: Any, source: str, at: tuple[int, int], reused: bool
) -> None:
    if reused and source in UNCHANGED and at == (0, 2):
        pytest.skip("what no epoch has changed yet is not saved, so that a program may set it otherwise")
    devices, given = split_cpu(2), make(source)
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the batches before the saved position")
        expected, position = read(DistributedDataset(given, devices), 3, save_at=at)
        random.random()
        data = DistributedDataset(given if reused else make(source), devices)
        data.load_state_dict(position)
        found, _ = read(data, 3 - at[0] - (at[1] < 0))
    assert found
    assert found == expected[-len(found) :]


def test_a_second_resume_is_right_too(split_cpu: Any) -> None:
    devices = split_cpu(1)
    expected, position = read(DistributedDataset(sampled(by_epoch, epoch=0), devices), 4, save_at=(1, -1))
    for epoch in (2, 3):
        data = DistributedDataset(sampled(by_epoch, epoch=0), devices)
        data.load_state_dict(position)
        found, position = read(data, 1, save_at=(0, -1))
        assert found == expected[4 * epoch : 4 * epoch + 4]


def cycling(self: Any) -> Iterator[int]:
    """Goes on with one iterator from epoch to epoch."""
    return itertools.islice(self.cycle, 15)


def of_objects(self: Any) -> Iterator[int]:
    """Shuffles an array of objects, which no checkpoint can hold."""
    np.random.default_rng(3).shuffle(self.order)
    return iter([bucket.rows[0] for bucket in self.order])


class Node:
    __slots__ = ("following", "row")

    def __init__(self, row: int, following: Any) -> None:
        self.row, self.following = row, following


def ring() -> Node:
    """Linked objects, of more objects than are looked into."""
    last = node = Node(ROWS - 1, None)
    for row in reversed(range(ROWS - 1)):
        node = Node(row, node)
    last.following = node
    return node


def linked(self: Any) -> Iterator[int]:
    for _ in range(15):
        yield self.node.row
        self.node = self.node.following


def pointing(self: Any) -> Iterator[int]:
    """A pointer into a list of objects."""
    rows = self.bucket.rows
    self.bucket = self.buckets[self.bucket is self.buckets[0]]
    return iter(rows)


def trained(self: Any) -> Iterator[int]:
    """Changes a parameter that might be one of the model."""
    self.weights.data[:3] *= 2
    return iter(self.weights.argsort().tolist())


BUCKETS = [Bucket(range(10)), Bucket(range(10, ROWS))]


@pytest.mark.parametrize(
    ("rows", "name", "state"),
    [
        (cycling, "cycle", {"cycle": itertools.cycle(range(ROWS))}),
        (of_objects, "order", {"order": np.array([Bucket([row]) for row in range(ROWS)], dtype=object)}),
        (linked, "node", {"node": ring()}),
        (pointing, "bucket", {"buckets": BUCKETS, "bucket": BUCKETS[0]}),
        (trained, "weights", {"weights": nn.Parameter(torch.ones(ROWS))}),
    ],
)
@pytest.mark.parametrize("at", [(0, -1), (1, 0)])
def test_what_cannot_be_saved_is_named_once(
    split_cpu: Any, rows: Any, name: str, state: dict[str, Any], at: tuple[int, int]
) -> None:
    data = DistributedDataset(sampled(rows, **copy.deepcopy(state)), split_cpu(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(data, 3, save_at=at)
        data.state_dict()
    (text,) = [str(warning.message) for warning in caught]
    assert f"without sampler.{name} " in text
    assert rows.__name__ in text
    assert "state_dict() and load_state_dict()" in text


class Harmless(Rows):
    """Opens, caches and counts, and none of that decides what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.file, self.lock, self.cache = None, threading.Lock(), {}
        self.latest: Any = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.file = self.file or (value for value in ())
        self.lock = threading.Lock()
        self.latest = datetime.datetime.now()
        self.cache.setdefault(index, Bucket([index]))
        return super().__getitem__(index)


def test_what_does_not_decide_the_order_is_not_warned_of(split_cpu: Any) -> None:
    loader = DataLoader(Harmless(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(DistributedDataset(loader, split_cpu(1)), 1, save_at=(0, -1))


def test_what_a_collator_of_transformers_sets_for_a_warning_is_not_warned_of() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    rows = [{"input_ids": [1] * (1 + number % 3)} for number in range(ROWS)]
    collate = transformers.DataCollatorWithPadding(tokenizer)
    loader = DataLoader(rows, BATCH, collate_fn=collate)
    attributes = SourceAttributes(loader)
    begun = attributes.look()
    next(iter(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attributes.state(begun, rows="unknown") == []  # as for the Trainer's checkpoint within an epoch


def test_an_attribute_that_never_changes_is_the_program_s(split_cpu: Any) -> None:
    devices = split_cpu(1)
    _, position = read(DistributedDataset(sampled(by_epoch, epoch=0), devices), 2, save_at=(1, -1))
    loader = sampled(by_epoch, epoch=0)
    loader.batch_sampler.batch_size = 4
    data = DistributedDataset(loader, devices)
    data.load_state_dict(position)
    assert loader.batch_sampler.batch_size == 4
    assert loader.sampler.epoch == 2


def test_a_program_that_sets_the_epoch_after_loading_has_its_own(split_cpu: Any) -> None:
    def make() -> Any:
        sampler = sampled(lambda self: order_of(self.epoch), epoch=0)
        sampler.sampler.set_epoch = lambda epoch: setattr(sampler.sampler, "epoch", epoch)
        return DistributedDataset(sampler, split_cpu(1))

    data = make()
    data.set_epoch(1)
    _, position = read(data, 1, save_at=(0, -1))
    data.set_epoch(2)
    expected, _ = read(data, 1)
    other = make()
    other.load_state_dict(position)
    other.set_epoch(2)
    assert read(other, 1)[0] == expected


def test_data_of_another_kind_is_refused(split_cpu: Any) -> None:
    devices = split_cpu(1)
    _, position = read(DistributedDataset(DataLoader(Rows(), batch_sampler=Buckets()), devices), 2, save_at=(1, -1))
    data = DistributedDataset(sampled(by_rng, rng=random), devices)
    with pytest.raises(DataError, match=r"the state of batch_sampler\.buckets\[0\].*give the data and samplers"):
        data.load_state_dict(position)


class Lazy:
    """Raises at every attribute that somebody asks for."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


def test_no_code_of_the_data_s_objects_runs(split_cpu: Any) -> None:
    rows = Rows()
    rows.library = Lazy()  # type: ignore[attr-defined]
    read(DistributedDataset(DataLoader(rows, BATCH), split_cpu(1)), 2, save_at=(1, -1))
