"""The path of every recipe that trains with ``Model``: compile, fit, test.

A recipe builds a ``Task`` from its config; what differs between recipes is in the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep import console
from lockstep.errors import CheckpointError
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.compile import Loss
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model

FEW_UPDATES = 80
"""With fewer updates in all the result is told to rest on few: the digits are learnt in 100, to an accuracy of 0.9."""
LOGGED_EVERY = 10
"""Updates, or global batches, from one point of the batch curves to the next."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ChooseBatchSize = Callable[[Model, tuple[Any, Any], int], int]
"""Returns the rows of a global batch for a compiled model, its longest rows (x, y), and the number of all rows."""
SAMPLE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parts of a run. They are plain PyTorch and do not depend on the number of replicas.

    Args:
        source: where the data is from, for a person to read.
        config: the recipe's configuration: epochs, patience, precision, accumulate, clip_norm, batch_size.
        module: the model, on the CPU.
        parameters: its number of parameters, tied ones counted once.
        train: training batches, with another order in every epoch, ``num_rows``, and ``longest(rows)`` to try a step.
        valid: validation batches, the same in every epoch; empty if nothing is held out.
        test: test batches.
        loss: the loss of ``Model.compile``.
        optimizer: makes the optimizer of parameters.
        scheduler: makes the learning rate schedule of an optimizer; None for a constant rate.
        metrics: name -> metric, as ``Model.compile`` takes them.
        sync_batchnorm: whether batch norm statistics are those of the global batch.
        callbacks: callbacks of the recipe, which run before early stopping.
        settings: returns name -> number, string or None of everything that the results depend on, except the devices.
    """

    source: str
    config: Any
    module: Any
    parameters: int
    train: Any
    valid: Any
    test: Any
    loss: Loss
    optimizer: MakeOptimizer
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    metrics: Mapping[str, Any]
    sync_batchnorm: bool = False
    callbacks: Sequence[Callback] = ()
    settings: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run.

    ``parameters`` is the number of parameters of the whole model, tied ones counted once, and ``fingerprint`` that of
    the end of the training, with the weights that were tested. ``batch_size`` is that of the config. ``updates`` counts
    the updates of all epochs. ``stopping`` says which epoch they are of; None if it is the last one, because
    ``patience`` is 0.
    """

    source: str
    history: History
    fingerprint: str
    test_metrics: Mapping[str, float]
    batch_size: int
    parameters: int
    updates: int
    stopping: Stopping | None = None

    @property
    def last_or_best_epoch(self) -> int:
        """The epoch, from 1, whose weights were tested: the best, or the last one if ``patience`` is 0."""
        return self.history.epoch[-1] + 1 if self.stopping is None else self.stopping.best_epoch

    @property
    def few_updates(self) -> str | None:
        """What to tell of a run with fewer updates than a model of random weights needs to learn; None of others."""
        if self.updates >= FEW_UPDATES:
            return None
        epochs, verb = console.counted(len(self.history.epoch), "epoch"), "is" if self.updates == 1 else "are"
        return f"{self.updates} in {epochs} {verb} few to learn from; give more --epochs or smaller batches"


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """Which epoch was the best, and whether the training ended early because none of the next ones was better.

    Args:
        monitor: the number that says which epoch is best: the lowest is.
        best_epoch: the best epoch, from 1, whose weights are tested and saved.
        last_epoch: the last epoch that was trained, from 1.
        patience: number of epochs without a better one after which training stops.
        early: whether it did.
    """

    monitor: str
    best_epoch: int
    last_epoch: int
    patience: int
    early: bool

    def __str__(self) -> str:
        best = f"epoch {self.best_epoch} by {self.monitor}, which is tested and saved"
        worse = f"{console.counted(self.patience, 'epoch')} without a lower {self.monitor}"
        after = f"stopped early after epoch {self.last_epoch}, {worse}"
        return f"{best}; {after}" if self.early else best


def compile_task(task: Task, strategy: Strategy) -> Model:
    """Returns a compiled ``Model`` of the task's module on the strategy."""
    config = task.config
    with strategy.scope():
        model = Model(task.module, sync_batchnorm=task.sync_batchnorm)
        model.compile(
            optimizer=task.optimizer,
            loss=task.loss,
            metrics=task.metrics,
            scheduler=task.scheduler,
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
        )
    return model


def with_batch_size(config: Any, task: Task, strategy: Strategy, choose: ChooseBatchSize) -> Any:
    """Returns the config with the batch size that ``choose`` returns. Every worker must call it.

    The task's module is mirrored meanwhile: make another task for the training.
    """
    rows = choose(compile_task(task, strategy), task.train.longest(SAMPLE_ROWS), task.train.num_rows)
    return replace(config, batch_size=rows)


def fit_and_test(
    task: Task, model: Model, *, callbacks: Sequence[Callback], log_dir: Path | None, verbose: Verbose
) -> Result:
    """Trains and validates epoch by epoch, then tests.

    Every worker must call it. Raises a CheckpointError if the backup is of a run with other settings.
    """
    config = task.config
    # A callback, so that the settings are saved with every backup, and compared when one is restored.
    all_callbacks = [*callbacks, ResumeCheck(task.settings), *task.callbacks]
    early_stopping: EarlyStopping | None = None
    if config.patience:
        monitor, patience = "val_loss" if task.valid else "loss", patience_epochs(config, len(task.train))
        early_stopping = EarlyStopping(monitor, patience=patience, restore_best_weights=True)
        all_callbacks.append(early_stopping)
    if log_dir is not None:
        all_callbacks.append(TensorBoard(log_dir, update_freq=LOGGED_EVERY))
    history = model.fit(
        task.train, validation_data=task.valid or None, epochs=config.epochs, callbacks=all_callbacks, verbose=verbose
    )
    fingerprint = model.fingerprint()  # before the test, which averages the buffers
    return Result(
        source=task.source,
        history=history,
        fingerprint=fingerprint,
        test_metrics=model.evaluate(task.test, verbose=0),
        batch_size=config.batch_size,
        parameters=task.parameters,
        updates=len(history.epoch) * updates_per_epoch(config, len(task.train)),
        stopping=None if early_stopping is None else _stopping_of(early_stopping, history),
    )


def patience_epochs(config: Any, batches: int) -> int:
    """Returns ``patience``, or as many epochs as have ``patience_updates`` updates if these are more.

    Early epochs of small data sets have few updates, and none of them may be better than the first.
    """
    return max(int(config.patience), math.ceil(int(config.patience_updates) / updates_per_epoch(config, batches)))


def updates_per_epoch(config: Any, batches: int) -> int:
    """Returns the updates of an epoch; a cycle of accumulation that its end cuts short counts."""
    return math.ceil(batches / int(config.accumulate))


def _stopping_of(callback: EarlyStopping, history: History) -> Stopping:
    return Stopping(
        monitor=callback.monitor,
        best_epoch=callback.best_epoch + 1,
        last_epoch=history.epoch[-1] + 1,
        patience=callback.patience,
        early=callback.stopped_epoch > 0,
    )


def num_parameters(module: nn.Module) -> int:
    """Returns the number of elements of all parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


class ResumeCheck(Callback):
    """Saves a run's settings in its checkpoints, and refuses to resume a run that had other settings.

    ``settings`` is called when the first checkpoint is saved or restored, so a run without checkpoints hashes no data.
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._find = settings

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return dict(self._find())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the settings of the saved run differ from those of this run."""
        changed = [name for name, value in self._settings.items() if name in state and state[name] != value]
        if changed:
            saved, now = (", ".join(f"{name}={of[name]!r}" for name in changed) for of in (state, self._settings))
            raise CheckpointError(
                f"the backup is of a run with {saved}, and this run has {now}; resume with the saved settings, or start"
                " anew in another folder"
            )


def settings_except(config: Any, names: Collection[str]) -> dict[str, Any]:
    """Returns name -> value of the fields of a config, except those that may change when a run is resumed."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in names}
