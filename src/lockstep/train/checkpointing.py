"""What a Model saves and loads: its module's weights in one file, or all state of its training in a checkpoint."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.export import stream_weights
from lockstep.checkpoint.format import check_kind, check_like
from lockstep.checkpoint.state_adapters import AdapterState, SavedState, StateAdapter
from lockstep.checkpoint.weights import check_fit, read_weights, write_weights
from lockstep.collectives.communicator import Communicator, run_on_chief
from lockstep.errors import CheckpointError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.compile import TrainSetup
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.logs import EpochTiming, History, RunningLoss
from lockstep.train.loop import TrainLoop
from lockstep.train.metrics import load_states, replica_states

if TYPE_CHECKING:
    from lockstep.checkpoint.sharded_io import TensorReader
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


class TrainingState(StateAdapter):
    """The part of a Model's checkpoints that is neither weights, optimizer nor scheduler.

    Args:
        model: whose training it is.

    Attributes:
        position: where the training is.
        run: what tells this training's checkpoints from another's; restored with them.
    """

    def __init__(self, model: Model) -> None:
        self._weak_model = weakref.ref(model)  # which owns this: a cycle would keep its weights after their last use
        self._fit: tuple[TrainLoop, EpochIterator, CallbackList] | None = None
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
    def during_fit(
        self, loop: TrainLoop, feed: EpochIterator, callbacks: CallbackList, *, epoch: int
    ) -> Iterator[None]:
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

    def state(self) -> AdapterState:
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
            return AdapterState(shared=shared)
        loop, feed, callbacks = self._fit
        if loop.pending:
            raise UsageError(
                f"a checkpoint was asked for {loop.pending} batches into an accumulation cycle, whose gradients it "
                "cannot hold; save after the update"
            )
        loop.in_flight.settle()  # a place behind a loss that was no number is none to go on from
        shared |= {"loss": [loop.loss.total, loop.loss.count], "callbacks": callbacks.state_dict()}
        replicas = [replica_states(metrics) for metrics in loop.metrics.per_replica]
        return AdapterState(shared=shared, replicas=replicas, worker=feed.state_dict())

    def check(self, saved: SavedState) -> None:
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

    def load(self, saved: SavedState) -> None:
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


_TOGETHER_BYTES = 32 * 2**20


def save_parts(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Writes the whole model's state_dict to a safetensors file. Every worker must call it; the chief writes."""
    from lockstep.checkpoint.sharded_state import sharded_module_of

    part = sharded_module_of(module)
    module.exchange_buffers()
    averages = dict(module.named_buffers())
    described, stream = part.described(), part.stream()
    averaged = ((name, averages.get(name, tensor)) for name, tensor in stream)
    failed: CheckpointError | None = None
    if workers.is_chief:
        try:
            stream_weights(path, described, averaged)
        except CheckpointError as error:
            failed = error
    for _ in stream:  # what the others, and a chief that could not write, do with the rest
        pass
    run_on_chief(workers, "save the weights", lambda: _raise(failed))


def load_parts(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Loads a whole model's safetensors file, if everything fits. Every worker must call it; the chief reads."""
    from lockstep.checkpoint.sharded_state import sharded_module_of

    part = sharded_module_of(module)
    described = part.described()
    stored = run_on_chief(workers, "load the weights", lambda: _opened(Path(path), described))
    for names in _together(described):
        tensors = [torch.empty_like(described[name], device="cpu") for name in names]
        run_on_chief(workers, "load the weights", lambda names=names, into=tensors: _read(stored, names, into))  # type: ignore[misc]
        workers.broadcast("loaded weights", tensors)
        for name, tensor in zip(names, tensors, strict=True):
            part.take(name, tensor)


def _opened(path: Path, described: Mapping[str, Tensor]) -> TensorReader:
    from safetensors import SafetensorError

    from lockstep.checkpoint.sharded_io import TensorReader

    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}; give the path of a file written by save_weights")
    try:
        stored = TensorReader(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the weights in {path}: {error}; give a safetensors file written by save_weights"
        ) from error
    check_fit(stored.tensors, described, path)
    return stored


def _read(stored: TensorReader | None, names: list[str], into: list[Tensor]) -> None:
    from lockstep.checkpoint.sharded_io import TensorShard

    if stored is not None:
        stored.read({name: TensorShard(tensor) for name, tensor in zip(names, into, strict=True)})


def _together(described: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names, in runs whose tensors are small enough together."""
    names: list[str] = []
    filled = 0
    for name, tensor in described.items():
        if names and filled + tensor.nbytes > _TOGETHER_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += tensor.nbytes
    if names:
        yield names


def _raise(error: CheckpointError | None) -> None:
    if error is not None:
        raise error


def save_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Writes the module's state_dict to a safetensors file. Every worker must call it; the chief writes."""
    if module.is_part:
        save_parts(module, workers, path)
        return
    module.exchange_buffers()
    state = module.state_dict()
    run_on_chief(workers, "save the weights", lambda: write_weights(state, path))


def load_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Loads a safetensors file into all copies, if everything fits. Every worker must call it; the chief reads."""
    if module.is_part:
        load_parts(module, workers, path)
        return
    state: dict[str, Tensor] = module.module.state_dict()

    def read() -> dict[str, Tensor]:
        weights = read_weights(path)
        check_fit(weights, state, path)
        return weights

    # The others go on from the chief's, which loading gives them.
    module.load_state_dict(run_on_chief(workers, "load the weights", read) or state)


def checkpoint_of(setup: TrainSetup | None, training: TrainingState) -> Checkpoint:
    """All state of a training.

    Raises:
        UsageError: not compiled with an optimizer.
    """
    if setup is None or setup.optimizer is None:
        raise UsageError("a checkpoint needs an optimizer; call model.compile(optimizer=..., loss=...) first")
    things = {"model": setup.module, "optimizer": setup.optimizer, "scheduler": setup.scheduler}
    things["precision"] = setup.precision if setup.precision.name == "fp16" else None
    return Checkpoint(**{name: thing for name, thing in things.items() if thing is not None}, training=training)
