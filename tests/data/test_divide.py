"""``ls.divide``: batches whose tensors have other than one row an example train as on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.data.batch_lists import ListReader
from lockstep.data.divide import Division
from lockstep.data.sharding import split_batch
from lockstep.errors import ConfigError, DataError

divide = ls.divide
FLAT = {
    "image": torch.arange(3),
    "batch_idx": torch.tensor([0, 0, 2, 2, 2]),
    "cls": torch.arange(5)[:, None],
    "file": ["a", "b", "c"],
    "size": 64,
}
PACKED = {
    "cu_seqlens": torch.tensor([0, 4, 4, 9], dtype=torch.int32),
    "input_ids": torch.arange(9)[None],
    "max_length": 5,
}


def parts(batch: Any, division: Division, replicas: int = 2) -> list[Any]:
    return split_batch(batch, replicas, ListReader(division=division))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, Tensor) else value


def test_an_index_counts_the_examples_of_each_replica():
    first, second, third, fourth = parts(FLAT, divide.by_index("batch_idx", of=["cls"]), 4)
    assert plain(first) == {"image": [0], "batch_idx": [0, 0], "cls": [[0], [1]], "file": ["a"], "size": 64}
    assert plain(second) == {"image": [1], "batch_idx": [], "cls": [], "file": ["b"], "size": 64}
    assert plain(third) == {"image": [2], "batch_idx": [0, 0, 0], "cls": [[2], [3], [4]], "file": ["c"], "size": 64}
    assert plain(fourth) == {"image": [], "batch_idx": [], "cls": [], "file": [], "size": 64}
    assert fourth["cls"].shape == (0, 1)
    assert FLAT["batch_idx"].tolist() == [0, 0, 2, 2, 2]  # type: ignore[attr-defined]


def test_entries_may_be_in_any_order_which_stays():
    batch = {"at": torch.tensor([2, 0, 1, 0, 2]), "of": torch.arange(5), "x": torch.zeros(3)}
    first, second = parts(batch, divide.by_index("at", of=["of"]))
    assert (first["at"].tolist(), first["of"].tolist()) == ([0, 1, 0], [1, 2, 3])
    assert (second["at"].tolist(), second["of"].tolist()) == ([0, 0], [0, 4])


def test_an_index_may_be_a_column_of_a_tuple_s_tensor():
    targets = torch.tensor([[0, 0.5], [2, 0.25], [2, 0.125]])
    batch = (torch.arange(3), targets, ["a", "b", "c"])
    first, second = parts(batch, divide.by_index(1, of=[1], column=0))
    assert plain(first) == [[0, 1], [[0, 0.5]], ["a", "b"]]
    assert plain(second) == [[2], [[0, 0.25], [0, 0.125]], ["c"]]
    assert targets[:, 0].tolist() == [0, 2, 2]


def test_names_reach_into_structures_and_arrays_are_tensors():
    batch = [torch.arange(2), {"boxes": {"at": np.array([0, 1, 1]), "xy": np.ones((3, 2), dtype=np.float32)}}]
    first, second = parts(batch, divide.by_index((1, "boxes", "at"), of=[(1, "boxes", "xy")]))
    assert first[1]["boxes"]["xy"].shape == (1, 2)
    assert second[1]["boxes"]["at"].tolist() == [0, 0]


def test_boundaries_begin_with_0_in_each_replica():
    division = divide.by_boundaries("cu_seqlens", of=["input_ids"], dim=1)
    first, second = parts(PACKED, division)
    assert plain(first) == {"cu_seqlens": [0, 4, 4], "input_ids": [[0, 1, 2, 3]], "max_length": 5}
    assert plain(second) == {"cu_seqlens": [0, 5], "input_ids": [[4, 5, 6, 7, 8]], "max_length": 5}
    assert second["cu_seqlens"].dtype == torch.int32
    assert plain(parts(PACKED, division, 4)[3]) == {"cu_seqlens": [0], "input_ids": [[]], "max_length": 5}


def test_lengths_are_one_an_example():
    batch = {"lengths": torch.tensor([4, 0, 5]), "ids": torch.arange(9), "label": torch.arange(3)}
    first, second = parts(batch, divide.by_lengths("lengths", of=["ids"]))
    assert plain(first) == {"lengths": [4, 0], "ids": [0, 1, 2, 3], "label": [0, 1]}
    assert plain(second) == {"lengths": [5], "ids": [4, 5, 6, 7, 8], "label": [2]}


def test_groups_and_blocks_of_rows_stay_whole():
    first, second = parts({"x": torch.arange(6), "scale": 2.0}, divide.in_groups(2))
    assert (first["x"].tolist(), second["x"].tolist(), second["scale"]) == ([0, 1, 2, 3], [4, 5], 2.0)
    first, second = parts({"x": torch.arange(6), "y": torch.arange(3)}, divide.in_blocks(2, of=["x"]))
    assert (plain(first), plain(second)) == ({"x": [0, 1, 3, 4], "y": [0, 1]}, {"x": [2, 5], "y": [2]})


def test_functions_of_the_program_divide_its_own_types():
    class Words:
        def __init__(self, words: list[str]) -> None:
            self.words = words

    def joined(examples: list[str]) -> dict[str, Tensor]:
        return {"letters": torch.tensor([ord(letter) for word in examples for letter in word], dtype=torch.int64)}

    by_word = divide.by_examples(lambda batch: batch.words, joined)
    shards = parts(Words(["ab", "c", "def"]), by_word, 4)
    assert [len(shard["letters"]) for shard in shards] == [2, 1, 3, 0]
    with pytest.raises(DataError, match=r"join\(\[\]\) raises ValueError: empty; .*drop_last=True"):
        parts(Words(["ab"]), divide.by_examples(lambda batch: batch.words, failing), 2)


def failing(examples: list[str]) -> Tensor:
    if not examples:
        raise ValueError("empty")
    return torch.zeros(len(examples))


@pytest.mark.parametrize(
    ("division", "changes", "message"),
    [
        (divide.by_index("idx", of=["cls"]), {}, r"no batch\['idx'\]; it has batch\[\"image\"\]"),
        (divide.by_index("batch_idx", of=["image"]), {}, r"batch\['image'\] has shape \(3,\), but .* of 5 entries"),
        (divide.by_index("batch_idx", of=["cls"]), {"batch_idx": torch.tensor([0, 0, 3, 2, 2])}, "numbers from 0 to 3"),
        (divide.by_index("cls", of=["batch_idx"]), {}, r"shape \(5, 1\), expected \[entries\]"),
        (divide.by_index("batch_idx", of=["cls"]), {"image": 1, "file": 2}, "not how many examples there are"),
        (divide.by_boundaries("image", of=["cls"]), {"image": torch.tensor([1, 5])}, r"begins with \[1, 5\]"),
        (
            divide.by_boundaries("image", of=["cls"]),
            {"image": torch.tensor([0, 4])},
            "of 4 entries, which are its dim 0",
        ),
        (divide.by_lengths("image", of=["cls"]), {}, r"the sum of batch\['image'\] is of 3 entries"),
        (divide.in_groups(2, of=["cls"]), {}, r"shape \(5, 1\), whose rows do not make groups of 2"),
        (divide.in_blocks(3, of=["cls"]), {}, "do not make 3 blocks"),
        (divide.by_index(("size", "at"), of=["cls"]), {}, r"batch\['size'\] is a int, in which"),
    ],
)
def test_what_does_not_fit_is_refused(division: Division, changes: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        parts({**FLAT, **changes}, division)


def test_boundaries_that_differ_are_refused():
    batch = {**PACKED, "cu_seqlens_k": torch.tensor([0, 3, 4, 9])}
    with pytest.raises(DataError, match="differ; give boundaries that are equal"):
        parts(batch, divide.by_boundaries("cu_seqlens", "cu_seqlens_k", of=["input_ids"], dim=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: divide.by_index("at", of="boxes"), "expected a list of names"),
        (lambda: divide.by_index("at", of=[]), "expected a list of names"),
        (lambda: divide.by_boundaries(of=["x"]), "by_boundaries got no name"),
        (lambda: divide.in_groups(0), "size=0"),
        (lambda: divide.by_examples(None, list), "split is a NoneType"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Callable[[], Division], message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_is_no_division_is_refused_with_one(make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match=r"divide='batch_idx' was given, expected what a function of ls\.divide"):
        make_strategy(2).distribute_dataset([FLAT], divide="batch_idx")
    with pytest.raises(DataError, match=r"divide=ls\.divide\.by_index\(\.\.\.\)"):
        list(make_strategy(2).distribute_dataset([FLAT]))


def test_fit_says_that_it_takes_one_row_an_example(make_strategy: MakeStrategy):
    strategy, net = make_strategy(2), nn.Linear(2, 1)
    with strategy.scope():
        model = ls.Model(net)
        model.compile(optimizer=torch.optim.SGD(net.parameters(), 0.1), loss="mse")
        data = strategy.distribute_dataset([(torch.ones(4, 2), torch.ones(4, 1))], divide=divide.in_groups(2))
        with pytest.raises(DataError, match=r"received data with divide=.* use it in a loop of your own"):
            model.fit(data, verbose=0)


# Three tasks: boxes of images, packed sequences, pairs of answers. Each has batches, a plain loss of a whole batch, and
# the losses of a shard, of which compute_average_loss makes the part of the mean.

ROWS = (8, 8, 7, 8, 5, 8, 8, 2)
WIDTH = 6


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def detection() -> Iterator[dict[str, Any]]:
    random = generator()
    for rows in ROWS:
        counts = torch.randint(0, 4, (rows,), generator=random)
        index = torch.arange(rows).repeat_interleave(counts)
        boxes = torch.randn(len(index), 3, generator=random, dtype=torch.float64)
        images = torch.randn(rows, WIDTH, generator=random, dtype=torch.float64)
        yield {"bboxes": boxes, "batch_idx": index, "img": images}


def of_boxes(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Of each box: how far it is from what the network says of its image."""
    return (net(batch["img"])[batch["batch_idx"]] - batch["bboxes"]).square().sum(1)


def of_images(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Of each image: the logarithm of the sum over its boxes, which is no sum over boxes."""
    losses, index = of_boxes(net, batch), batch["batch_idx"]
    total = torch.zeros(len(batch["img"]), dtype=losses.dtype).index_add(0, index, losses)
    return total.log1p() + net(batch["img"]).square().sum(1)


def packing() -> Iterator[dict[str, Any]]:
    random = generator()
    for rows in ROWS:
        starts = torch.cat([torch.zeros(1), torch.randint(1, 5, (rows,), generator=random).cumsum(0)]).int()
        tokens = torch.randn(1, int(starts[-1]), WIDTH, generator=random, dtype=torch.float64)
        yield {"tokens": tokens, "cu_seqlens": starts, "labels": torch.arange(int(starts[-1]))[None] % 3}


def of_tokens(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Of each token, from what attends to its sequence alone."""
    tokens, starts = batch["tokens"][0], batch["cu_seqlens"].long()
    sequence = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    scores = (tokens @ tokens.T).masked_fill(sequence[:, None] != sequence, -1e9)
    return F.cross_entropy(net(scores.softmax(1) @ tokens), batch["labels"][0], reduction="none")


def pairs() -> Iterator[dict[str, Any]]:
    """All chosen answers, and then all rejected ones, beside one margin for each pair."""
    random = generator()
    for rows in ROWS:
        answers = torch.randn(2 * rows, WIDTH, generator=random, dtype=torch.float64)
        yield {"answers": answers, "margin": torch.rand(rows, generator=random, dtype=torch.float64)}


def of_pairs(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    chosen, rejected = net(batch["answers"])[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected - batch["margin"])


Losses = Callable[[nn.Module, dict[str, Any]], Tensor]
TASKS: dict[str, tuple[Callable[[], Iterator[Any]], Losses, Division]] = {
    "boxes": (detection, of_boxes, divide.by_index("batch_idx", of=["bboxes"])),
    "images": (detection, of_images, divide.by_index("batch_idx", of=["bboxes"])),
    "tokens": (packing, of_tokens, divide.by_boundaries("cu_seqlens", of=["tokens", "labels"], dim=1)),
    "pairs": (pairs, of_pairs, divide.in_blocks(2, of=["answers"])),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def one_device(name: str) -> dict[str, Tensor]:
    batches, losses, _ = TASKS[name]
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for batch in batches():
        losses(net, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def trained(strategy: Any, name: str, source: Any = None, *, mean: bool = False) -> dict[str, Tensor]:
    """The weights after a loop on replicas; with ``mean``, of a loop with the mistake of dividing by the shard."""
    batches, losses, division = TASKS[name]
    net = network()
    model = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.05))

    def step(batch: dict[str, Any]) -> None:
        values = losses(model, batch)
        (values.mean() if mean else ls.compute_average_loss(values)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in strategy.distribute_dataset(list(batches()) if source is None else source, divide=division):
        strategy.run(step, (batch,))
    return {key: value.clone() for key, value in net.state_dict().items()}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_a_loop_trains_as_one_device(name: str, replicas: int, make_strategy: MakeStrategy):
    torch.testing.assert_close(trained(make_strategy(replicas), name), one_device(name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TASKS)
def test_a_mean_over_a_shard_s_entries_is_warned_of(name: str, make_strategy: MakeStrategy):
    with pytest.warns(UserWarning, match="mean over each replica's rows"):
        trained(make_strategy(2), name, mean=True)


def collated(examples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch of detections as collate functions make it: boxes behind each other, with an index."""
    images, boxes = zip(*examples, strict=True)
    index = torch.arange(len(boxes)).repeat_interleave(torch.tensor(list(map(len, boxes))))
    return {"bboxes": torch.cat(boxes), "batch_idx": index, "img": torch.stack(images)}


def loader() -> DataLoader[Any]:
    examples = [
        (image, batch["bboxes"][batch["batch_idx"] == number])
        for batch in detection()
        for number, image in enumerate(batch["img"])
    ]
    return DataLoader(examples, batch_size=10, collate_fn=collated)  # type: ignore[arg-type]


WORKERS = (2, 1)


def job() -> dict[str, Any]:
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    devices = [f"cpu:{number}" for number in range(WORKERS[int(os.environ["RANK"])])]
    strategy = ls.MultiWorkerMirroredStrategy(devices, communication=ls.CommunicationOptions(lost_after_s=60))
    weights = {name: trained(strategy, name) for name in TASKS}
    weights["loader"] = trained(strategy, "images", loader())
    strategy.close()
    return weights


@cache
def of_workers() -> dict[str, Any]:
    return ls.launch(job, workers=len(WORKERS), timeout_s=250)


@pytest.mark.workers
@pytest.mark.parametrize("name", TASKS)
def test_workers_train_as_one_device(name: str):
    torch.testing.assert_close(of_workers()[name], one_device(name), rtol=0, atol=1e-12)


@pytest.mark.workers
def test_workers_that_collate_their_rows_train_as_one_process(split_cpu: Any):
    with closing(ls.MirroredStrategy(split_cpu(2))) as strategy:
        expected = trained(strategy, "images", loader())
    torch.testing.assert_close(of_workers()["loader"], expected, rtol=0, atol=1e-12)
