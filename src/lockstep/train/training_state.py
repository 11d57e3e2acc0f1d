"""What a checkpoint of a Model holds beside weights, optimizer and scheduler: where fit is, and all that it carries.

Together they make a resumed fit go on at the very sample, with the very numbers, of the one that was interrupted.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.format import check_kind, check_like
from lockstep.checkpoint.state_adapters import Part, PartState, SavedPart
from lockstep.errors import UsageError
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.history import EpochTiming, History
from lockstep.train.loop import TrainLoop
from lockstep.train.metric_states import load_states, replica_states
from lockstep.train.running_loss import RunningLoss

if TYPE_CHECKING:
    from lockstep.train.model import Model


_SAVED_IN_FIT: Any = {"loss": list[float], "callbacks": dict[str, dict[str, Any]]}
_METRICS = dict[str, list[Any]]
_PLACE: Any = {"passed": int, "epoch": int, "random": dict[str, Tensor]}


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a training.

    Args:
        epoch: the epoch that is under way or comes next, from 0.
        batch: how many of its global batches are done.
        step: how many global batches are done in all, over all epochs.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0


_SAVED: Any = {
    "position": Position,
    "run": str,
    "stopped": bool | int,
    "history": {"history": dict[str, list[float]], "epoch": list[int], "timing": list[EpochTiming]},
}


class TrainingState(Part):
    """The part of a Model's checkpoints that is neither weights, optimizer nor scheduler.

    Args:
        model: whose training it is.

    Attributes:
        position: where the training is.
        run: what tells this training's checkpoints from another's; restored with them.
    """

    def __init__(self, model: Model) -> None:
        self._weak_model = weakref.ref(model)  # which owns this: a cycle would keep its weights after their last use
        self._fit: tuple[TrainLoop, Feed, CallbackList] | None = None
        self._position = Position()
        self.run = uuid.uuid4().hex

    @property
    def _model(self) -> Model:
        model = self._weak_model()
        if model is None:
            raise UsageError("the Model of this state is gone; keep the Model as long as its checkpoints are in use")
        return model

    @property
    def position(self) -> Position:
        """Where the training is; outside fit, where it was last."""
        if self._fit is None:
            return self._position
        loop = self._fit[0]
        return Position(epoch=loop.epoch, batch=loop.batch, step=loop.step)

    @property
    def at_update(self) -> bool:
        """Whether no gradients wait for their update, so that a checkpoint can hold everything."""
        return self._fit is None or not self._fit[0].pending

    @contextmanager
    def of_fit(self, loop: TrainLoop, feed: Feed, callbacks: CallbackList, *, epoch: int) -> Iterator[None]:
        """Inside the block these belong to the state; the loop goes on counting steps where the last one stopped.

        Args:
            loop: about to begin with ``epoch``.
            feed: its batches.
            callbacks: those of the fit.
            epoch: from 0.
        """
        loop.epoch, loop.step = epoch, self._position.step
        self._fit = (loop, feed, callbacks)
        try:
            yield
        finally:
            self._position, self._fit = self.position, None

    def state(self) -> PartState:
        """All of it.

        Raises:
            UsageError: in the middle of an accumulation cycle, whose gradients no checkpoint holds.
            NonFiniteLossError: that of a step which a GPU was still computing when ``fit`` went on.
        """
        shared: dict[str, Any] = {
            "position": asdict(self.position),
            "run": self.run,
            "stopped": self._model.stop_training,
            "history": _history_state(self._model.history),
        }
        if self._fit is None:
            return PartState(shared=shared)
        loop, feed, callbacks = self._fit
        if loop.pending:
            raise UsageError(
                f"a checkpoint was asked for {loop.pending} batches into an accumulation cycle, whose gradients it "
                "cannot hold; save after the update"
            )
        loop.under_way.settle()  # a place behind a loss that was no number is none to go on from
        shared |= {"loss": [loop.loss.total, loop.loss.count], "callbacks": callbacks.state_dict()}
        replicas = [replica_states(metrics) for metrics in loop.metrics.per_replica]
        return PartState(shared=shared, replicas=replicas, worker=feed.state_dict())

    def check(self, saved: SavedPart) -> None:
        """A state of any training fits."""
        check_kind(saved.shared, _SAVED, "training")
        if self._fit is None or "loss" not in saved.shared:
            return
        check_kind(saved.shared, _SAVED_IN_FIT, "training")
        check_kind(saved.replicas, list[_METRICS], "metrics")
        for metrics in self._fit[0].metrics.per_replica[:1]:
            for states in saved.replicas:
                check_like(states, _kinds_of_states(metrics), "metrics")
        check_kind(saved.worker, _PLACE, "place in the data")

    def load(self, saved: SavedPart) -> None:
        """Takes it; the parts that belong to a fit under way only during one."""
        shared = saved.shared
        self.run = shared["run"]
        self._position = Position(**shared["position"])
        self._model.history = _history(shared["history"])
        if self._fit is None:
            return
        loop, feed, callbacks = self._fit
        loop.epoch, loop.batch, loop.step = self._position.epoch, self._position.batch, self._position.step
        self._model.stop_training = shared["stopped"]
        if "loss" not in shared:  # saved outside fit
            return
        loop.loss = RunningLoss(*shared["loss"])
        loop.metrics.reset()
        workers = self._model.strategy.workers
        load_states(loop.metrics.per_replica, saved.replicas, first=saved.first_replica, replicas=workers.num_replicas)
        callbacks.load_state_dict(shared["callbacks"])
        feed.load_state_dict(saved.worker)


def _kinds_of_states(metrics: dict[str, Any]) -> dict[str, Any]:
    """``replica_states`` with an empty tensor for each tensor, and an empty list for each list."""
    return {
        name: [
            {
                "updates": 0,
                "states": {
                    key: [] if isinstance(value, list) else torch.empty(0) for key, value in each["states"].items()
                },
            }
            for each in states
        ]
        for name, states in replica_states(metrics).items()
    }


def _history_state(history: History) -> dict[str, Any]:
    return {
        "history": {name: list(values) for name, values in history.history.items()},
        "epoch": list(history.epoch),
        "timing": [asdict(timing) for timing in history.timing],
    }


def _history(state: Mapping[str, Any]) -> History:
    history = History()
    history.history = {name: list(values) for name, values in state["history"].items()}
    history.epoch = list(state["epoch"])
    history.timing = [EpochTiming(**timing) for timing in state["timing"]]
    return history
