"""What a Model saves and loads: the weights in one file, or a checkpoint of all state of its training.

A fit that is resumed from a checkpoint goes on at the same sample, with the same numbers, as one not interrupted.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.state_adapters import AdapterState, SavedState, StateAdapter
from lockstep.checkpoint.weights import check_fit, read_weights, write_weights
from lockstep.checks import check_path
from lockstep.collectives.communicator import Communicator, refuse_to_save, run_on_chief
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.fit import TrainLoop
from lockstep.train.logs import History, RunningLoss
from lockstep.train.metrics import load_states, replica_states
from lockstep.train.torch_weights import is_of_torch, read_torch_weights, write_torch_weights
from lockstep.weights_formats import weights_format

if TYPE_CHECKING:
    from lockstep.parallel.sharded_module import ShardedModule
    from lockstep.train.model import Model


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a training."""

    epoch: int = 0  # the current or next one, counted from 0
    batch: int = 0  # how many global batches of the epoch are done
    step: int = 0  # how many global batches are done over all epochs


class TrainingState(StateAdapter):
    """What checkpoints hold beside weights, optimizer and scheduler. ``run`` identifies this training in each."""

    def __init__(self, model: Model) -> None:
        self._weak_model = weakref.ref(model)  # the model owns this; a cycle would keep its weights alive
        self._fit: tuple[TrainLoop, EpochIterator, CallbackList] | None = None
        self._position = Position()
        self.run = uuid.uuid4().hex

    @property
    def _model(self) -> Model:
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

    @property
    def module(self) -> MirroredModule:
        """The mirrored module of the model."""
        return self._model._module

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
        """Any saved training fits: what a model has no use for is ignored."""

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


def save_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Writes the module's state_dict, in the format of the file's suffix. Every worker must call it; the chief writes.

    The chief gathers a model that is divided among workers in its host memory, one tensor after another.
    """
    refuse_to_save(workers, "save_weights")
    target = Path(check_path(path, "the path of the weights"))
    write = write_torch_weights if weights_format(target, "the path of the weights") == "torch" else write_weights
    module.exchange_buffers()
    part = part_of(module)
    state: dict[str, Tensor] = module.state_dict() if part is None else {}
    if part is not None:
        averages = dict(module.named_buffers())
        for name, tensor in part.stream():
            if workers.is_chief:
                state[name] = averages.get(name, tensor).cpu()
    run_on_chief(workers, "save the weights", lambda: write(state, target))


def host_state(module: MirroredModule) -> dict[str, Tensor]:
    """Returns a copy of the module's state_dict on the CPU, made one tensor after another.

    Every worker must call it; each of them gets the whole of a model that is divided among them.
    """
    module.exchange_buffers(always=False)
    part = part_of(module)
    state = module.state_dict().items() if part is None else part.stream()
    averages = {} if part is None else dict(module.named_buffers())
    return {name: averages.get(name, tensor).detach().to("cpu", copy=True) for name, tensor in state}


def load_arrays(module: MirroredModule, arrays: Sequence[Any]) -> None:
    """Loads arrays in the order of the module's state_dict into all copies. Every worker must call it."""
    part = part_of(module)
    state: dict[str, Tensor] = module.module.state_dict() if part is None else part.described()
    if len(arrays) != len(state):
        raise ConfigError(
            f"set_weights got {len(arrays)} arrays for the {len(state)} tensors of the state_dict; give as many, in "
            "its order, as get_weights returns them"
        )
    tensors = {name: torch.as_tensor(array) for name, array in zip(state, arrays, strict=True)}
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ConfigError(
                f"set_weights got an array of shape {tuple(tensor.shape)} for {name!r} of shape "
                f"{tuple(state[name].shape)}; give arrays in the order of the state_dict, as get_weights returns them"
            )
    module.load_state_dict(tensors)


def load_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Loads a file of weights into all copies if everything fits. Every worker must call it; the chief reads."""
    source = Path(check_path(path, "the path of the weights"))
    part = part_of(module)
    state: dict[str, Tensor] = module.module.state_dict() if part is None else part.described()

    def read() -> dict[str, Tensor]:
        weights = read_torch_weights(source) if is_of_torch(source) else read_weights(source)
        check_fit(weights, state, source)
        return weights

    weights = run_on_chief(workers, "load the weights", read)
    if part is None:  # loading gives the chief's weights to the other workers, which pass their own
        module.load_state_dict(weights or state)
        return
    # One tensor after another, so that no worker but the chief holds the whole model beside its own part.
    for name, like in state.items():
        tensor = torch.empty_like(like, device="cpu")
        if weights is not None:
            tensor.copy_(weights[name])
        workers.broadcast("loaded weights", [tensor])
        part.take(name, tensor)


def part_of(module: MirroredModule) -> ShardedModule | None:
    """This worker's part of a divided model; None for a whole one."""
    if not module.is_part:
        return None
    from lockstep.checkpoint.sharded_state import sharded_module_of  # late: torch's part of it takes over a second

    return sharded_module_of(module)
