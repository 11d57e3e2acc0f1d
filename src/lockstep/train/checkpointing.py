"""What a Model saves and loads: the weights in one file, or a checkpoint of all state of its training.

A fit that is resumed from a checkpoint goes on at the same sample, with the same numbers, as one not interrupted.
"""

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
from lockstep.checkpoint.state_adapters import AdapterState, SavedState, StateAdapter
from lockstep.checkpoint.weights import check_fit, read_weights, stream_weights, write_weights
from lockstep.collectives.communicator import Communicator, run_on_chief
from lockstep.errors import CheckpointError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.compile import TrainSetup
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.fit import TrainLoop
from lockstep.train.logs import EpochTiming, History, RunningLoss
from lockstep.train.metrics import load_states, replica_states

if TYPE_CHECKING:
    from lockstep.checkpoint.sharded_io import TensorReader
    from lockstep.train.model import Model


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a training.

    Args:
        epoch: the current or next epoch, counted from 0.
        batch: how many of its global batches are done.
        step: how many global batches are done over all epochs.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0


class TrainingState(StateAdapter):
    """What a Model's checkpoints hold beside weights, optimizer and scheduler.

    Args:
        model: the model that is trained.

    Attributes:
        run: an identifier of this training, restored with its checkpoints.
    """

    def __init__(self, model: Model) -> None:
        self._weak_model = weakref.ref(model)  # the model owns this; a cycle would keep its weights alive
        self._fit: tuple[TrainLoop, EpochIterator, CallbackList] | None = None
        self._position = Position()
        self.run = uuid.uuid4().hex

    @property
    def _model(self) -> Model:
        if (model := self._weak_model()) is None:
            raise UsageError("the Model of this state no longer exists; keep it as long as its checkpoints are in use")
        return model

    @property
    def position(self) -> Position:
        """The current position; outside fit, the last one."""
        if self._fit is None:
            return self._position
        loop = self._fit[0]
        return Position(epoch=loop.epoch, batch=loop.batch, step=loop.step)

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
            raise UsageError(
                f"a checkpoint was asked for {loop.pending} batches into an accumulation cycle, whose gradients it "
                "cannot hold; save after the update"
            )
        loop.loss.settle()  # nobody can go on after a loss that is NaN
        shared |= {"loss": [loop.loss.total, loop.loss.count], "callbacks": callbacks.state_dict()}
        replicas = [replica_states(metrics) for metrics in loop.metrics.per_replica]
        return AdapterState(shared=shared, replicas=replicas, worker=data.state_dict())

    def check(self, saved: SavedState) -> None:
        """Any saved training fits: what a model has no use for is ignored."""

    def load(self, saved: SavedState) -> None:
        """Loop, data and callbacks are restored during a fit only."""
        shared = saved.shared
        self.run = shared["run"]
        self._position = Position(**shared["position"])
        history = shared["history"]
        self._model.history = History(**{**history, "timing": [EpochTiming(**each) for each in history["timing"]]})
        if self._fit is None:
            return
        loop, data, callbacks = self._fit
        loop.epoch, loop.batch, loop.step = self._position.epoch, self._position.batch, self._position.step
        self._model.stop_training = shared["stopped"]
        if "loss" not in shared:  # saved outside fit
            return
        loop.loss = RunningLoss(*shared["loss"])
        loop.metrics.reset()
        workers = self._model.strategy.workers
        load_states(loop.metrics.per_replica, saved.replicas, first=saved.first_replica, replicas=workers.num_replicas)
        callbacks.load_state_dict(shared["callbacks"])
        data.load_state_dict(saved.worker)


def _save_sharded(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Writes the weights of a sharded model, one tensor after another; no worker keeps the whole model."""
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
    for _ in stream:  # the other workers, and a chief that could not write, take part to the end
        pass

    def report() -> None:
        if failed is not None:
            raise failed

    run_on_chief(workers, "save the weights", report)


def _load_sharded(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Loads the weights of a sharded model: the chief reads one tensor after another; each worker takes its shard."""
    from lockstep.checkpoint.sharded_io import TensorShard
    from lockstep.checkpoint.sharded_state import sharded_module_of

    part = sharded_module_of(module)
    described = part.described()
    stored: Any = run_on_chief(workers, "load the weights", lambda: _opened(Path(path), described))
    for name, like in described.items():
        tensor = torch.empty_like(like, device="cpu")
        shard = {name: TensorShard(tensor)}
        run_on_chief(workers, "load the weights", lambda shard=shard: stored.read(shard))  # type: ignore[misc]
        workers.broadcast("loaded weights", [tensor])
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


def save_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Writes the module's state_dict to a safetensors file. Every worker must call it; the chief writes."""
    if module.is_part:
        _save_sharded(module, workers, path)
        return
    module.exchange_buffers()
    state = module.state_dict()
    run_on_chief(workers, "save the weights", lambda: write_weights(state, path))


def load_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Loads a safetensors file into all copies if everything fits. Every worker must call it; the chief reads."""
    if module.is_part:
        _load_sharded(module, workers, path)
        return
    state: dict[str, Tensor] = module.module.state_dict()

    def read() -> dict[str, Tensor]:
        weights = read_weights(path)
        check_fit(weights, state, path)
        return weights

    # Loading gives the chief's weights to the other workers, which pass their own.
    module.load_state_dict(run_on_chief(workers, "load the weights", read) or state)


def checkpoint_of(setup: TrainSetup | None, training: TrainingState) -> Checkpoint:
    """A checkpoint of all state of a training. Without an optimizer it raises a UsageError."""
    if setup is None or setup.optimizer is None:
        raise UsageError("a checkpoint needs an optimizer; call model.compile(optimizer=..., loss=...) first")
    parts = {"model": setup.module, "optimizer": setup.optimizer, "scheduler": setup.scheduler}
    parts["precision"] = setup.precision if setup.precision.name == "fp16" else None
    return Checkpoint(**{name: part for name, part in parts.items() if part is not None}, training=training)
