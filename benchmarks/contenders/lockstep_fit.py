"""Ours through ``Model.fit``: what the loop around the step costs beside the hand-written one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import lockstep as ls
from benchmarks.contenders.lockstep_run import split_cpu
from benchmarks.contenders.plain import trained_parameters
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Trial
from lockstep.train.callbacks.base import Callback
from lockstep.train.model import Model


class _LapEveryBatch(Callback):
    """Tells the stopwatch that a batch is done."""

    def __init__(self, laps: Laps) -> None:
        super().__init__()
        self._laps = laps

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """Counts a lap."""
        self._laps.lap(logs["loss"])


def fit_model(trial: Trial, seat: Seat, laps: Laps) -> None:
    """Trains with ``Model.fit`` on ``trial.contender.shares`` replicas."""
    torch.set_num_threads(trial.cores)
    torch.manual_seed(0)
    workload = trial.workload
    strategy = ls.MirroredStrategy(split_cpu(trial.contender.shares))
    with strategy.scope():
        module = workload.make_module()
        model = Model(module)
        model.compile(
            optimizer=torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True), loss=workload.loss
        )
    laps.trained = trained_parameters(module)
    model.fit(workload.make_batches(laps.total), callbacks=[_LapEveryBatch(laps)], verbose=0)
    strategy.close()
