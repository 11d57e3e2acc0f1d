"""The Model as callbacks, loops and checkpoints see it: they stand below it, and it gives itself to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.strategies.base import Strategy
from lockstep.train.logs import History, StepClock


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a training."""

    epoch: int = 0  # the current or next one, counted from 0
    batch: int = 0  # how many global batches of the epoch are done
    step: int = 0  # how many global batches are done over all epochs


class StateOfTraining(Protocol):
    """The state beside weights, optimizer and scheduler. ``TrainingState`` describes the members."""

    run: str

    @property
    def position(self) -> Position: ...
    @property
    def at_update(self) -> bool: ...
    @property
    def module(self) -> MirroredModule: ...
    def exchanging(self, *, averaged: bool) -> AbstractContextManager[None]: ...


class TrainedModel(Protocol):
    """What ``self.model`` of a callback has. ``Model`` describes the members, and has more."""

    stop_training: bool
    history: History
    clock: StepClock
    learning_rate: float

    @property
    def strategy(self) -> Strategy: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def optimizer(self) -> MirroredOptimizer | None: ...
    @property
    def scheduler(self) -> LRScheduler | None: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def training_state(self) -> StateOfTraining: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def evaluate(self) -> Callable[..., dict[str, float]]: ...
    @property
    def predict(self) -> Callable[..., Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def host_state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def get_weights(self) -> list[Any]: ...
    def set_weights(self, weights: Sequence[Any]) -> None: ...
    def save_weights(self, path: str | os.PathLike[str]) -> None: ...
    def load_weights(self, path: str | os.PathLike[str]) -> None: ...
    def checkpoint(self) -> Checkpoint: ...
    def load_checkpoint(self, path: str | os.PathLike[str]) -> Position: ...
    def fingerprint(self) -> str: ...
