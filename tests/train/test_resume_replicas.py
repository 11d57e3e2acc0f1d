"""A training of three replicas that goes on, in the middle of an epoch, on another number of workers: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object
from lockstep.config import LogicalDevice
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.model import Model

pytestmark = pytest.mark.workers

REPLICAS, STOP_AT = 3, 7  # global batches, of six an epoch


class SaveAndStop(ls.Callback):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        step = self.model.training_state.position.step
        if step == STOP_AT:
            ls.CheckpointManager(self.model.checkpoint(), self._folder).save(step)
            self.model.stop_training = True


def train(strategy: Strategy, callback: ls.Callback | None) -> tuple[str, dict[str, list[float]]]:
    """With random masks, batch norm, an uneven last batch and a metric."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Dropout(0.5), nn.Linear(33, 4))
    with strategy.scope():
        model = Model(net)
    model.compile(
        lambda parameters: torch.optim.Adam(parameters, 0.01),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": MulticlassAccuracy(4)},
        clip_norm=1.0,
    )
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(46, 6, generator=random), torch.randint(0, 4, (46,), generator=random)
    history = model.fit(x, y, 9, 3, callbacks=[] if callback is None else [callback], verbose=0)
    return ls.fingerprint(model), history.history


def go_on(strategy: Strategy, folder: Path) -> tuple[str, dict[str, list[float]]]:
    return train(strategy, ls.BackupAndRestore(folder, save_freq=False, delete_checkpoint=False))


def job(saved: Path, to_save: Path) -> list[Any]:
    """What each of two workers, with two replicas and one, has after going on from ``saved``; they save another."""
    torch.set_num_threads(1)
    make = partial(ls.MultiWorkerMirroredStrategy, ["cpu:0"], seed=1, replicas=REPLICAS)
    with closing(make()) as strategy:
        train(strategy, SaveAndStop(to_save))
    with closing(make()) as strategy:
        return all_gather_object(strategy.workers, "ended", go_on(strategy, saved))


@pytest.fixture
def make(split_cpu: Callable[[int], tuple[LogicalDevice, ...]], one_core: None) -> Callable[[], MirroredStrategy]:
    """A function that makes a strategy of three replicas on two devices."""
    devices = split_cpu(2)
    return lambda: MirroredStrategy(devices, replicas=REPLICAS, seed=1)


def test_it_ends_with_the_same_bits_in_one_process_and_among_two_workers(
    make: Callable[[], MirroredStrategy], tmp_path: Path
):
    with closing(make()) as strategy:
        whole = train(strategy, None)
    with closing(make()) as strategy:
        stopped = train(strategy, SaveAndStop(tmp_path / "one"))

    among_workers = ls.launch(job, workers=2, args=(tmp_path / "one", tmp_path / "two"), timeout_s=150)
    with closing(make()) as strategy:
        of_workers = go_on(strategy, tmp_path / "two")

    assert stopped[0] != whole[0]
    assert among_workers == [whole, whole]
    assert of_workers == whole
