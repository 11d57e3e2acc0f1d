"""Streams that real workers read: every row once, and the numbers of one device, through a kill and a resume too."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import train
from torch import Tensor, nn

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object
from lockstep.errors import ClusterError

pytestmark = [pytest.mark.workers, pytest.mark.slow]
datasets = pytest.importorskip("datasets")
pytest.importorskip("torchdata")

SHARDS = {0: range(7), 1: range(7, 11), 2: range(11, 17)}
BATCH, EPOCHS, STOP_AFTER = 3, 2, 2
Rows = list[list[float]]
"""The rows of each step, by their numbers."""


def read(shards: Sequence[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for row in SHARDS[shard]:
            yield {"n": row}


def collate(rows: list[dict[str, int]]) -> tuple[Tensor, Tensor]:
    n = torch.tensor([float(row["n"]) for row in rows], dtype=torch.float64)
    return torch.stack([n / 10, n % 3], dim=1), torch.sin(n)[:, None]


def loader(processes: int = 0) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": [*SHARDS]})
    return StatefulDataLoader(stream, batch_size=BATCH, collate_fn=collate, num_workers=processes)


def linear() -> nn.Linear:
    module = nn.Linear(2, 1).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.5, -0.25]]))
        module.bias.zero_()
    return module


def make_strategy() -> ls.MultiWorkerMirroredStrategy:
    torch.set_num_threads(1)
    return ls.MultiWorkerMirroredStrategy(["cpu:0"], communication=ls.CommunicationOptions(lost_after_s=60))


def fit(strategy: ls.Strategy, data: Any, *callbacks: ls.Callback) -> list[float]:
    with strategy.scope():
        model = ls.Model(linear())
    model.compile(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), loss=nn.MSELoss())
    model.fit(data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return weights(model.state_dict())


def weights(state: Any) -> list[float]:
    return torch.cat([state[name].flatten() for name in ("weight", "bias")]).tolist()


class Loop:
    """A loop of its own with a checkpoint that holds the data; it stops after some steps of the first epoch."""

    def __init__(self, strategy: ls.Strategy, folder: str) -> None:
        network = linear()
        self.data = strategy.distribute_dataset(loader(), shard="file")
        self.strategy, self.network, self.progress = strategy, network, {"epoch": 0}
        self.model = strategy.mirror(network)
        self.optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1, momentum=0.9))
        checkpoint = ls.Checkpoint(model=self.model, optimizer=self.optimizer, data=self.data, progress=self.progress)
        self.manager = ls.CheckpointManager(checkpoint, folder)
        self.manager.restore_or_initialize()

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        rows = ls.get_replica_context().all_reduce("sum", torch.tensor(float(len(x))))
        (((self.model(x) - y) ** 2).sum() / rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, stop_after: int | None = None) -> tuple[Rows, list[float]]:
        rows: Rows = []
        while self.progress["epoch"] < EPOCHS:
            for batch in self.data:
                self.strategy.run(self.step, args=(batch,))
                rows.append([round(10 * n) for n in batch[0].values[0][:, 0].tolist()])
                if len(rows) == stop_after:
                    self.manager.save(stop_after)
                    return rows, []
            self.progress["epoch"] += 1
        return rows, weights(self.network.state_dict())


def job(folder: str) -> dict[str, Any]:
    strategy = make_strategy()
    found: dict[str, Any] = {"fit": fit(strategy, strategy.distribute_dataset(loader(), shard="file"))}
    found["fit on the same data"] = fit(strategy, loader())
    whole = Loop(strategy, f"{folder}/whole").run()
    first = Loop(strategy, f"{folder}/stopped").run(STOP_AFTER)
    rest = Loop(strategy, f"{folder}/stopped").run()
    found["rows"] = all_gather_object(strategy.workers, "rows", whole[0])
    found["rows with a stop"] = all_gather_object(strategy.workers, "rows", first[0] + rest[0])
    found["loop"], found["loop with a stop"] = whole[1], rest[1]
    strategy.close()
    return found


@cache
def result(folder: str) -> dict[str, Any]:
    return ls.launch(job, workers=2, args=(folder,), timeout_s=200)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(str(tmp_path_factory.mktemp("streams")))


def by_hand(batches: Sequence[Sequence[float]]) -> list[float]:
    """The weights that one device has after the batches, given by the numbers of their rows."""
    rows = [collate([{"n": int(n)} for n in numbers]) for numbers in batches]
    return weights(train(linear(), rows, loss=nn.functional.mse_loss).module.state_dict())


def cut(rows: Sequence[int]) -> list[list[int]]:
    return [[*rows[start : start + BATCH]] for start in range(0, len(rows), BATCH)]


def steps_by_hand(read_by: Sequence[Sequence[int]]) -> list[list[int]]:
    """The global batches of an epoch, given the shards that each worker reads: worker 0's rows, then worker 1's."""
    own = [cut([row for shard in shards for row in SHARDS[shard]]) for shards in read_by]
    return [[row for batch in step for row in batch] for step in zip_longest(*own, fillvalue=[])]


def shards_of(rows: Rows) -> list[int]:
    found = {row for batch in rows for row in batch}
    return [shard for shard, own in SHARDS.items() if found & {*own}]


def test_each_row_is_read_once_an_epoch_by_the_worker_that_has_its_shard(found: dict[str, Any]):
    first, second = found["rows"]
    both = [one + other for one, other in zip(first, second, strict=True)]
    expected = steps_by_hand([shards_of(first), shards_of(second)])
    assert sorted(shards_of(first) + shards_of(second)) == [*SHARDS]
    assert both == expected * EPOCHS
    assert [] in first + second  # the ends are uneven


def test_fit_and_a_loop_have_the_weights_of_one_device(found: dict[str, Any]):
    first, second = found["rows"]
    expected = by_hand([one + other for one, other in zip(first, second, strict=True)])
    assert found["fit"] == pytest.approx(expected, rel=1e-12)
    assert found["loop"] == pytest.approx(expected, rel=1e-12)
    assert found["fit on the same data"] == pytest.approx(by_hand(cut(range(17)) * EPOCHS), rel=1e-12)


def test_a_loop_goes_on_at_the_very_sample(found: dict[str, Any]):
    assert found["rows with a stop"] == found["rows"]
    assert found["loop with a stop"] == found["loop"]


class Count(ls.Callback):
    """Counts the batches; and kills worker 1 after some batches of the second epoch."""

    def __init__(self, kill: bool) -> None:
        super().__init__()
        self.kill, self.epoch, self.batches = kill, 0, 0

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.batches += 1
        if self.kill and (self.epoch, batch) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def backed_up(folder: str, kill: bool) -> tuple[list[float], int]:
    warnings.filterwarnings("error", message=".*are read again")
    strategy = make_strategy()
    count = Count(kill and strategy.workers.index == 1)
    data = strategy.distribute_dataset(loader(processes=1), shard="file")
    found = fit(strategy, data, ls.BackupAndRestore(folder, save_freq=1), count)
    strategy.close()
    return found, count.batches


def test_a_killed_fit_goes_on_at_the_very_sample(tmp_path: Path, found: dict[str, Any]):
    with pytest.raises(ClusterError, match="worker 1"):
        ls.launch(backed_up, workers=2, args=(str(tmp_path), True), timeout_s=100)
    after, batches = ls.launch(backed_up, workers=2, args=(str(tmp_path), False), timeout_s=100)
    assert after == found["fit"]
    assert batches < len(found["rows"][0]) / EPOCHS  # those of the second epoch that were left
