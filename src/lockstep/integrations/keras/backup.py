"""BackupAndRestore for Keras models: ``fit``, called again after an interruption, continues at the batch.

    fit begins -> newest backup restored -> its epoch begins: the batches before are read and left out -> training
    every ``save_freq`` batches, or epoch -> saved: variables, metrics, position, random numbers now and of the epoch's
    beginning, from which the order of its rows was drawn

Keras's own callback of this name has no position in the epoch: it trains the interrupted epoch from its first batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import torch

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.state_adapters import AdapterState, SavedState, StateAdapter
from lockstep.checks import check_path, shown
from lockstep.data.random_state import random_state, set_random_state
from lockstep.errors import CheckpointError, ConfigError
from lockstep.integrations.keras.model import DistributedModel
from lockstep.integrations.keras.variables import ModelVariables


class BackupAndRestore(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Saves the state of training so that ``fit``, called again after any interruption, continues where it stopped.

    For a model of ``distribute``, in place of ``keras.callbacks.BackupAndRestore``, with its arguments. The resumed
    training has the bits of one that was not interrupted, on as many replicas; on another number those of one device to
    rounding, without dropout. The backup has the model's variables, the optimizer's, the metrics of the epoch, and all
    random numbers; it has no state of other callbacks. The data must be given as before: batches of the epoch that
    were trained before the backup are read again and left out. Every worker must have it among its callbacks.

    Args:
        backup_dir: the folder of the backups, for this training alone. The chief writes.
        save_freq: "epoch", or every this many batches, counted over all epochs.
        double_checkpoint: keep the backup before the last one too.
        delete_checkpoint: remove the backups when ``fit`` has ended.

    Raises:
        ConfigError: ``save_freq`` is neither; or, in ``fit``, the model was not given to ``distribute``, or
            ``steps_per_epoch`` cuts the data into epochs.
        CheckpointError: the backup is of another model, or the folder cannot be written to.

    Example:
        >>> from lockstep.integrations.keras import BackupAndRestore
        >>> callback = BackupAndRestore("backup", save_freq=100)
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and (type(save_freq) is not int or save_freq < 1):
            raise ConfigError(f"BackupAndRestore(save_freq={shown(save_freq)}); give 'epoch' or a number of batches")
        self.backup_dir = check_path(backup_dir, "BackupAndRestore(backup_dir)")
        self.save_freq, self.double_checkpoint, self.delete_checkpoint = save_freq, double_checkpoint, delete_checkpoint
        self._is_due = False
        self._training: _Training | None = None
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest backup. Every worker must call it."""
        model = self.model
        if not isinstance(model, DistributedModel):
            raise ConfigError(
                "lockstep's BackupAndRestore is for models of distribute; give the model to distribute, or use "
                "keras.callbacks.BackupAndRestore"
            )
        self._training = _Training(model)
        with model._distribution.strategy.scope():
            checkpoint = Checkpoint(training=self._training)
        self._manager = CheckpointManager(checkpoint, self.backup_dir, keep=2 if self.double_checkpoint else 1)
        model._initial_epoch = None
        if self._manager.restore_or_initialize() is not None:
            model._distribution.default_generators.continue_as_restored()
            # Keras's fit begins at this epoch if it is set: its own BackupAndRestore sets it too.
            model._initial_epoch = self._training.epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch, or continues the restored one."""
        self._active[0].begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves if ``save_freq`` batches have been trained since. Every worker must call it."""
        training, manager = self._active
        before = training.step
        training.count_batches(batch + 1)
        if self.save_freq != "epoch" and training.step // self.save_freq > before // self.save_freq:
            self._is_due = training.batch == self.params["steps"]  # then it waits for the validation
            if not self._is_due:
                manager.save(training.step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves if ``save_freq`` is "epoch", or the last batch was one to save after. Every worker must call it."""
        training, manager = self._active
        training.end_epoch()
        if self.save_freq == "epoch" or self._is_due:
            manager.save(training.step)
        self._is_due = False

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the backups. Every worker must call it."""
        self.model._initial_epoch = None  # Keras keeps it, and the model's next fit would begin there too
        if self.delete_checkpoint:
            self._active[1].remove_own(with_folder=True)

    @property
    def _active(self) -> tuple[_Training, CheckpointManager]:
        if self._training is None or self._manager is None:
            raise ConfigError("BackupAndRestore is used outside fit; give it to fit(callbacks=[...])")
        return self._training, self._manager


class _Training(StateAdapter):
    """The state of a Keras model in ``fit``, and its position.

    Attributes:
        epoch: the current or next epoch, from 0.
        batch: how many batches of it have been trained.
        step: how many have been trained over all epochs.
    """

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.epoch = self.batch = self.step = 0
        self._epoch_random = random_state(None)
        self._left_out = 0  # batches of the restored epoch, which are read again
        self._metrics: list[Any] | None = None  # restored ones, until the epoch begins: fit resets metrics before it
        self._read_through_here()

    def _read_through_here(self) -> None:
        """Has the batches of each epoch come through ``_batches``."""
        iterator = self._model._distribution.epoch_iterator()
        if iterator.steps_per_epoch is not None:
            raise ConfigError(
                f"fit(steps_per_epoch={iterator.steps_per_epoch}) was given with BackupAndRestore, which continues "
                "epochs that are whole passes over the data; leave steps_per_epoch out, or use "
                "keras.callbacks.BackupAndRestore"
            )
        batches = iterator._enumerate_iterator
        # Keras calls no hook between the beginning of an epoch and its first batch. There the order of the rows is
        # drawn, and there the batches that were trained before are left out.
        iterator._enumerate_iterator = lambda: self._batches(batches)

    def _batches(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Keras's batches of an epoch, as (first step, last step, iterator) -> those that were not trained yet."""
        left_out, self._left_out = self._left_out, 0
        now = random_state(None)
        if left_out:
            # The rows are drawn again from the numbers from which the interrupted epoch drew them
            # (test_rows_of_a_loader_that_draws_are_those_that_were_left).
            set_random_state(None, self._epoch_random)
        else:
            self._epoch_random = now
        for first, last, iterator in batches():
            if first >= left_out:
                yield first, last, iterator
                continue
            for _ in range(first, last + 1):
                next(iterator, None)
            if last + 1 >= left_out:
                # What comes next draws the numbers that it would have drawn without the interruption.
                set_random_state(None, now)

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, with the metrics of the restored one."""
        if self._metrics is None:
            self.epoch, self.batch = epoch, 0
            return
        _assign(self._variables()["metrics"], self._metrics)
        self._metrics = None

    def count_batches(self, batch: int) -> None:
        """Notes that ``batch`` batches of the epoch have been trained."""
        self.step += batch - self.batch
        self.batch = batch

    def end_epoch(self) -> None:
        """Notes that the epoch has been trained."""
        self.epoch, self.batch = self.epoch + 1, 0

    def _variables(self) -> dict[str, list[Any]]:
        variables = ModelVariables(self._model)
        optimizer = [] if self._model.optimizer is None else list(self._model.optimizer.variables)
        return {
            "weights": [*variables.trainable, *variables.statistics],
            "seeds": variables.seeds,
            "metrics": variables.metrics,
            "optimizer": optimizer,
        }

    def _replica_seeds(self) -> list[Any]:
        return [generator.state for generator in self._model._distribution.default_generators.generators()]

    def state(self) -> AdapterState:
        variables = {name: _values(group) for name, group in self._variables().items()}
        position = {"epoch": self.epoch, "batch": self.batch, "step": self.step}
        return AdapterState(
            shared={"position": position, "variables": variables, "epoch random": self._epoch_random},
            replicas=_values(self._replica_seeds()),
        )

    def check(self, entry: SavedState) -> None:
        for name, group in self._variables().items():
            shapes = [tuple(value.shape) for value in _values(group)]
            saved_shapes = [tuple(value.shape) for value in entry.shared["variables"][name]]
            if shapes != saved_shapes:
                raise CheckpointError(
                    f"{entry.source} has {name} of the shapes {shown(saved_shapes)}, but the model has "
                    f"{shown(shapes)}; build and compile the model as it was, or give another backup_dir"
                )

    def load(self, entry: SavedState) -> None:
        """Loads all but the metrics, which ``begin_epoch`` loads. Of another number, replicas keep their seeds."""
        for name, group in self._variables().items():
            if name != "metrics":
                _assign(group, entry.shared["variables"][name])
        position = entry.shared["position"]
        self.epoch, self.batch, self.step = position["epoch"], position["batch"], position["step"]
        self._left_out, self._epoch_random = self.batch, entry.shared["epoch random"]
        self._metrics = entry.shared["variables"]["metrics"] if self.batch else None
        if entry.local_items is not None:
            _assign(self._replica_seeds(), entry.local_items)


def _values(variables: list[Any]) -> list[torch.Tensor]:
    return [variable.value.detach().cpu().clone() for variable in variables]


def _assign(variables: list[Any], values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
