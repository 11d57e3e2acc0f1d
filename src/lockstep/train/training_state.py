"""What checkpoints hold of a training beside weights, optimizer and scheduler.

A fit that is resumed from a checkpoint goes on at the same sample, with the same numbers, as one not interrupted.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, astuple, replace
from typing import Any

from lockstep.checkpoint.state_adapters import AdapterState, SavedState, StateAdapter
from lockstep.errors import UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.fit import TrainLoop
from lockstep.train.logs import History, RunningLoss
from lockstep.train.metrics import load_states, replica_states
from lockstep.train.trained_model import Position, TrainedModel


class TrainingState(StateAdapter):
    """What checkpoints hold beside weights, optimizer and scheduler. ``run`` identifies this training in each."""

    def __init__(self, model: TrainedModel, module: MirroredModule) -> None:
        self._weak_model = weakref.ref(model)  # the model owns this; a cycle would keep its weights alive
        self.module = module
        self._fit: tuple[TrainLoop, EpochIterator, CallbackList] | None = None
        self._position = Position()
        self.run = uuid.uuid4().hex

    @property
    def _model(self) -> TrainedModel:
        if (model := self._weak_model()) is None:
            raise UsageError("the Model of this checkpoint no longer exists; keep a reference to it")
        return model

    @property
    def position(self) -> Position:
        """The current position; outside fit, the last one."""
        if self._fit is None:
            return self._position
        loop = self._fit[0]
        return Position(epoch=loop.epoch, batch=loop.batch, step=loop.step)

    def count_step(self) -> None:
        """Counts a step that was made outside fit."""
        self._position = replace(self._position, step=self._position.step + 1)

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last update's gradients, during fit; None if there is no ``clip_norm``."""
        norm = None if self._fit is None else self._fit[0].grad_norm
        return None if norm is None else float(norm)

    @property
    def at_update(self) -> bool:
        """Whether no gradients wait for their update, which a checkpoint could not hold."""
        return self._fit is None or not self._fit[0].pending

    @contextmanager
    def during_fit(
        self, loop: TrainLoop, data: EpochIterator, callbacks: CallbackList, *, epoch: int
    ) -> Iterator[None]:
        """Makes loop, data and callbacks part of the state for the block. Steps are counted on from the last fit."""
        loop.epoch, loop.step = epoch, self._position.step
        self._fit = (loop, data, callbacks)
        try:
            yield
        finally:
            self._position, self._fit = self.position, None

    def exchanging(self, *, averaged: bool) -> AbstractContextManager[None]:
        """A block in which the model has the averages of its weights, if a callback of a fit has some, or the weights.

        Outside replicas; every worker must enter it.
        """
        return nullcontext() if self._fit is None else self._fit[2].exchanging(averaged=averaged)

    def saving(self) -> AbstractContextManager[None]:
        return self.exchanging(averaged=False)

    def state(self) -> AdapterState:
        shared: dict[str, Any] = {
            "position": asdict(self.position),
            "run": self.run,
            "stopped": self._model.stop_training,
            "history": asdict(self._model.history),
        }
        if self._fit is None:
            return AdapterState(shared=shared)
        loop, data, callbacks = self._fit
        if loop.pending:
            raise UsageError("a checkpoint cannot hold the gradients of an accumulation cycle; save after the update")
        loop.loss.settle()  # nobody can go on after a loss that is NaN
        shared |= {"loss": loop.loss.state(), "callbacks": callbacks.state_dict()}
        replicas = [replica_states(metrics) for metrics in loop.metrics.per_replica]
        return AdapterState(shared=shared, replicas=replicas, worker=data.state_dict())

    def check(self, entry: SavedState) -> None:
        """Raises a CheckpointError if a callback of the running fit cannot go on from its state.

        Any other saved training fits: what a model has no use for is ignored.
        """
        if self._fit is not None:
            self._fit[2].check_state_dict(entry.shared.get("callbacks", {}))

    def load(self, entry: SavedState) -> None:
        """Loop, data and callbacks are restored during a fit only."""
        shared = entry.shared
        self.run, self._position, history = shared["run"], Position(**shared["position"]), shared["history"]
        self._model.history = History.restored(history)
        if self._fit is None:
            return
        loop, data, callbacks = self._fit
        loop.epoch, loop.batch, loop.step = astuple(self._position)
        self._model.stop_training = shared["stopped"]
        if "loss" not in shared:  # saved outside fit
            return
        loop.loss = RunningLoss.restored(shared["loss"])
        loop.metrics.reset()
        workers = self._model.strategy.workers
        load_states(loop.metrics.per_replica, entry.replicas, first=entry.first_replica, replicas=workers.num_replicas)
        callbacks.load_state_dict(shared["callbacks"])
        # Each worker has a position of its own where it reads data of its own. On another number of them a position in
        # data that all read is any worker's, and one in a worker's own data is refused when it is resumed.
        position = entry.worker_index if len(entry.workers) == workers.processes.size else 0
        data.load_state_dict(entry.workers[position])
