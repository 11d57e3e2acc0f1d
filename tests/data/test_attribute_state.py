"""Data that goes on at a saved position has the order of data that was never left, whatever the order follows from.

What cannot be saved is named by a warning when the position is saved.
"""

from __future__ import annotations

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
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from lockstep.checkpoint.format import flatten, unflatten
from lockstep.data.dataset import DistributedDataset
from lockstep.errors import DataError

ROWS, BATCH = 20, 6


class Order(Sampler[int]):
    """Shuffles by ``rng``, which has a method ``shuffle``."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return ROWS


class InPlace(Order):
    """Shuffles one list again and again, with numbers that begin anew in each epoch."""

    def __init__(self) -> None:
        super().__init__(None)
        self.order = list(range(ROWS))

    def __iter__(self) -> Iterator[int]:
        random.Random(3).shuffle(self.order)
        return iter(list(self.order))


class Permuted(InPlace):
    """The same with an array."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.array = order

    def __iter__(self) -> Iterator[int]:
        self.array[...] = self.array[np.random.default_rng(3).permutation(len(self.array))]
        return iter([int(row) for row in self.array[:ROWS]])


class ByEpoch(Order):
    """Counts its epochs, at the end of each."""

    def __init__(self) -> None:
        super().__init__(None)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        random.Random(self.epoch).shuffle(order)
        yield from order
        self.epoch += 1


class ByClass(Order):
    epochs = 0

    def __init__(self) -> None:
        super().__init__(None)
        type(self).epochs = 0

    def __iter__(self) -> Iterator[int]:
        type(self).epochs += 1
        return iter(random.Random(self.epochs).sample(range(ROWS), ROWS))


class Late(Order):
    """Makes its generator when it is first used."""

    def __init__(self) -> None:
        super().__init__(None)

    def __iter__(self) -> Iterator[int]:
        if self.rng is None:
            self.rng = np.random.default_rng(5)
        return super().__iter__()


class InContainers(Sampler[int]):
    """Draws from generators in a list of dicts, beside which a number changes."""

    def __init__(self) -> None:
        self.streams: list[dict[str, Any]] = [{"rngs": (random.Random(7), np.random.default_rng(7)), "drawn": 0}]

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        for rng in self.streams[0]["rngs"]:
            rng.shuffle(order)
        self.streams[0]["drawn"] += 1
        order = order[self.streams[0]["drawn"] :] + order[: self.streams[0]["drawn"]]
        return iter(order)

    def __len__(self) -> int:
        return ROWS


class Slots(Sampler[int]):
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = itertools.count(2)

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(next(self.count)).sample(range(ROWS), ROWS))

    def __len__(self) -> int:
        return ROWS


class Told(Order):
    """Holds its state where nobody sees it, and tells it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.hidden = bytearray(1)

    def __iter__(self) -> Iterator[int]:
        self.hidden[0] += 1
        return iter(random.Random(self.hidden[0]).sample(range(ROWS), ROWS))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.hidden[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.hidden[0] = state["epoch"]


class Buckets(Sampler[list[int]]):
    """Batches from buckets, each with a pointer, that are visited in an order drawn by a nested sampler's generator."""

    def __init__(self) -> None:
        self.buckets = [Bucket(range(10)), Bucket(range(10, ROWS))]
        self.inner = {"order": Order(np.random.RandomState(3))}

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
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, 3, (ROWS,), generator=generator)
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
        yield from (self.rows[index] for index in random.Random(self.reads).sample(range(ROWS), ROWS))


class ToldStream(Stream):
    """The same, and it goes on at the very row."""

    def __init__(self) -> None:
        super().__init__()
        self.row = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = random.Random(self.reads).sample(range(ROWS), ROWS)
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
        self.loader = DataLoader(Rows(), BATCH, sampler=Order(random.Random(1)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Collate:
    """Adds noise that it draws itself."""

    def __init__(self) -> None:
        self.rng = None

    def __call__(self, rows: Any) -> Any:
        self.rng = self.rng or random.Random(9)
        return torch.utils.data.default_collate([(x + self.rng.random(), y) for x, y in rows])


def closure() -> Callable[[Any], Any]:
    step = 0

    def collate(rows: Any) -> Any:
        nonlocal step
        step += 1
        return torch.utils.data.default_collate([(x * step, y) for x, y in rows])

    return collate


SHARED = random.Random()
epochs_begun = 0


class OfModule(Order):
    """Draws from a generator of its module, as one script's sampler and augmentation do."""

    def __init__(self) -> None:
        super().__init__(None)
        SHARED.seed(8)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(ROWS), key=lambda _: SHARED.random()))


class ByModule(Order):
    """Counts epochs in its module."""

    def __init__(self) -> None:
        global epochs_begun
        super().__init__(None)
        epochs_begun = 0

    def __iter__(self) -> Iterator[int]:
        global epochs_begun
        epochs_begun += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(epochs_begun)).tolist())


def collate_by_module(rows: Any) -> Any:
    return torch.utils.data.default_collate([(x * SHARED.randint(1, 100), y) for x, y in rows])


def by_collate_of_module() -> DataLoader[Any]:
    SHARED.seed(9)
    return sampled(SequentialSampler(range(ROWS)), collate_fn=collate_by_module)


class Bare(Sampler[int]):
    """Has no attributes."""

    def __len__(self) -> int:
        return ROWS


class BareByGenerator(Bare):
    def __iter__(self) -> Iterator[int]:
        return iter(SHARED.sample(range(ROWS), ROWS))


class BareByClass(Bare):
    epochs = 0

    def __iter__(self) -> Iterator[int]:
        type(self).epochs += 1
        return iter(random.Random(self.epochs).sample(range(ROWS), ROWS))


class BareByModule(Bare):
    def __iter__(self) -> Iterator[int]:
        global epochs_begun
        epochs_begun += 1
        return iter(random.Random(epochs_begun).sample(range(ROWS), ROWS))


class BareByItem(Bare):
    def __iter__(self) -> Iterator[int]:
        COUNTS["epochs"] += 1
        return iter(random.Random(COUNTS["epochs"]).sample(range(ROWS), ROWS))


COUNTS = {"epochs": 0}


def bare(kind: type[Bare]) -> DataLoader[Any]:
    global epochs_begun
    SHARED.seed(8)
    BareByClass.epochs = epochs_begun = COUNTS["epochs"] = 0
    return sampled(kind())


class ByFactory(Order):
    """Counts in a dict with a default."""

    def __init__(self, factory: Callable[[], int]) -> None:
        super().__init__(None)
        self.counts = defaultdict(factory)
        assert self.counts["epochs"] in (0, 3)

    def __iter__(self) -> Iterator[int]:
        self.counts["epochs"] += 1
        return iter(random.Random(self.counts["epochs"]).sample(range(ROWS), ROWS))


class Streams(NamedTuple):
    order: random.Random
    offset: int


class InFields(Order):
    """Draws from generators in a named tuple and in a dict whose keys are tuples."""

    def __init__(self) -> None:
        super().__init__(None)
        self.streams = Streams(random.Random(3), 1)
        self.by_key = {(0, "a"): random.Random(4)}

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        for rng in (self.streams.order, self.by_key[0, "a"]):
            rng.shuffle(order)
        return iter(order)


class Weighted(Order):
    """Changes a parameter in place."""

    def __init__(self) -> None:
        super().__init__(None)
        self.weights = nn.Parameter(torch.ones(ROWS), requires_grad=False)

    def __iter__(self) -> Iterator[int]:
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
        return iter(random.Random(int(self.epochs + self.rows)).sample(range(ROWS), ROWS))

    def __len__(self) -> int:
        return ROWS


def batches_of_closure() -> Any:
    epochs = [0]

    class Closure:
        def __iter__(self) -> Iterator[Any]:
            epochs[0] += 1
            return iter(sampled(Order(random.Random(epochs[0]))))

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


def calling() -> DataLoader[Any]:
    SHARED.seed(9)
    return sampled(SequentialSampler(range(ROWS)), Calling())


def sampled(sampler: Sampler[int], rows: Dataset[Any] | None = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(rows or Rows(), BATCH, sampler=sampler, **settings)


SOURCES: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: sampled(Order(random.Random(7))),
    "RandomState": lambda: sampled(Order(np.random.RandomState(7))),
    "numpy Generator": lambda: sampled(Order(np.random.default_rng(7))),
    "a generator made late": lambda: sampled(Late()),
    "generators in containers": lambda: sampled(InContainers()),
    "Python's own": lambda: sampled(Order(random)),
    "a list": lambda: sampled(InPlace()),
    "an array": lambda: sampled(Permuted(np.arange(ROWS))),
    "a large tensor": lambda: sampled(Permuted(torch.arange(20_000) % ROWS)),
    "an epoch counter": lambda: sampled(ByEpoch()),
    "a counter of the class": lambda: sampled(ByClass()),
    "a generator of the module": lambda: sampled(OfModule()),
    "a counter of the module": lambda: sampled(ByModule()),
    "a collator with a generator of the module": by_collate_of_module,
    "a generator of the module alone": lambda: bare(BareByGenerator),
    "a counter of the class alone": lambda: bare(BareByClass),
    "a counter of the module alone": lambda: bare(BareByModule),
    "an item of the module": lambda: bare(BareByItem),
    "a dict with a default": lambda: sampled(ByFactory(int)),
    "a dict with a function's default": lambda: sampled(ByFactory(lambda: 3)),
    "generators in fields": lambda: sampled(InFields()),
    "a parameter": lambda: sampled(Weighted()),
    "buffers": lambda: sampled(Module()),  # type: ignore[arg-type]
    "a class in a closure": batches_of_closure,
    "rows that call a function": calling,
    "a count in a slot": lambda: sampled(Slots()),
    "state_dict": lambda: sampled(Told()),
    "buckets": lambda: DataLoader(Rows(), batch_sampler=Buckets()),
    "a nested sampler": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(Order(random.Random(2)), BATCH, False)),
    "rows that draw": lambda: sampled(SequentialSampler(range(ROWS)), Rows(random.Random(4).random)),
    "a collator that draws": lambda: sampled(SequentialSampler(range(ROWS)), collate_fn=Collate()),
    "a closure": lambda: sampled(SequentialSampler(range(ROWS)), collate_fn=closure()),
    "processes": lambda: sampled(Order(random.Random(7)), num_workers=1),
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
    devices, given = split_cpu(2), SOURCES[source]()
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the batches before the saved position")
        expected, position = read(DistributedDataset(given, devices), 3, save_at=at)
        random.random()
        data = DistributedDataset(given if reused else SOURCES[source](), devices)
        data.load_state_dict(position)
        found, _ = read(data, 3 - at[0] - (at[1] < 0))
    assert found
    assert found == expected[-len(found) :]


def test_a_second_resume_is_right_too(split_cpu: Any) -> None:
    devices = split_cpu(1)
    expected, position = read(DistributedDataset(sampled(ByEpoch()), devices), 4, save_at=(1, -1))
    for epoch in (2, 3):
        data = DistributedDataset(sampled(ByEpoch()), devices)
        data.load_state_dict(position)
        found, position = read(data, 1, save_at=(0, -1))
        assert found == expected[4 * epoch : 4 * epoch + 4]


class Cycling(Order):
    """Goes on with one iterator from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__(None)
        self.rows = itertools.cycle(random.Random(1).sample(range(ROWS), ROWS))

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.rows, 15)


class Objects(Order):
    """Shuffles an array of objects, which no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__(None)
        self.order = np.array([Bucket([row]) for row in range(ROWS)], dtype=object)

    def __iter__(self) -> Iterator[int]:
        np.random.default_rng(3).shuffle(self.order)
        return iter([bucket.rows[0] for bucket in self.order])


class Ring(Order):
    """A pointer into a ring of linked objects, of more objects than are looked into."""

    class Node:
        __slots__ = ("following", "row")

        def __init__(self, row: int, following: Any) -> None:
            self.row, self.following = row, following

    def __init__(self) -> None:
        super().__init__(None)
        last = self.node = Ring.Node(ROWS - 1, None)
        for row in reversed(range(ROWS - 1)):
            self.node = Ring.Node(row, self.node)
        last.following = self.node

    def __iter__(self) -> Iterator[int]:
        for _ in range(15):
            yield self.node.row
            self.node = self.node.following


class Pointing(Order):
    """A pointer into a list of objects."""

    def __init__(self) -> None:
        super().__init__(None)
        self.buckets = [Bucket(range(10)), Bucket(range(10, ROWS))]
        self.bucket = self.buckets[0]

    def __iter__(self) -> Iterator[int]:
        rows = self.bucket.rows
        self.bucket = self.buckets[self.bucket is self.buckets[0]]
        return iter(rows)


class Trained(Order):
    """Changes a parameter that might be one of the model."""

    def __init__(self) -> None:
        super().__init__(None)
        self.weights = nn.Parameter(torch.ones(ROWS))

    def __iter__(self) -> Iterator[int]:
        self.weights.data[:3] *= 2
        return iter(self.weights.argsort().tolist())


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (Cycling, "sampler.rows"),
        (Objects, "sampler.order"),
        (Ring, "sampler.node"),
        (Pointing, "sampler.bucket"),
        (Trained, "sampler.weights"),
    ],
)
@pytest.mark.parametrize("at", [(0, -1), (1, 0)])
def test_what_cannot_be_saved_is_named_once(split_cpu: Any, sampler: Any, name: str, at: tuple[int, int]) -> None:
    data = DistributedDataset(sampled(sampler()), split_cpu(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(data, 3, save_at=at)
        data.state_dict()
    (text,) = [str(warning.message) for warning in caught]
    assert f"without {name} " in text
    assert sampler.__name__ in text
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


def test_an_attribute_that_never_changes_is_the_program_s(split_cpu: Any) -> None:
    devices = split_cpu(1)
    _, position = read(DistributedDataset(sampled(ByEpoch()), devices), 2, save_at=(1, -1))
    loader = sampled(ByEpoch())
    loader.batch_sampler.batch_size = 4
    data = DistributedDataset(loader, devices)
    data.load_state_dict(position)
    assert loader.batch_sampler.batch_size == 4
    assert loader.sampler.epoch == 2


def test_a_program_that_sets_the_epoch_after_loading_has_its_own(split_cpu: Any) -> None:
    class Seeded(ByEpoch):
        def __iter__(self) -> Iterator[int]:
            return iter(random.Random(self.epoch).sample(range(ROWS), ROWS))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = DistributedDataset(sampled(Seeded()), split_cpu(1))
    data.set_epoch(1)
    _, position = read(data, 1, save_at=(0, -1))
    data.set_epoch(2)
    expected, _ = read(data, 1)
    other = DistributedDataset(sampled(Seeded()), split_cpu(1))
    other.load_state_dict(position)
    other.set_epoch(2)
    assert read(other, 1)[0] == expected


def test_data_of_another_kind_is_refused(split_cpu: Any) -> None:
    devices = split_cpu(1)
    _, position = read(DistributedDataset(DataLoader(Rows(), batch_sampler=Buckets()), devices), 2, save_at=(1, -1))
    data = DistributedDataset(sampled(Order(random)), devices)
    with pytest.raises(DataError, match=r"the state of batch_sampler\.buckets\[0\].*give the data and samplers"):
        data.load_state_dict(position)


class Lazy:
    """Raises at every attribute that somebody asks for."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


def test_no_code_of_the_data_s_objects_runs(split_cpu: Any) -> None:
    rows = Rows()
    rows.library = Lazy()  # type: ignore[attr-defined]
    read(DistributedDataset(sampled(SequentialSampler(rows), rows), split_cpu(1)), 2, save_at=(1, -1))
