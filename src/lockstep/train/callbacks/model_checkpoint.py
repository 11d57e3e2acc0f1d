"""ModelCheckpoint: writes the weights, or whole checkpoints, at the end of epochs or every so many batches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoint.format import check_kind
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.callbacks.given_path import given_path
from lockstep.train.callbacks.monitor import Mode, Monitor
from lockstep.train.callbacks.progress import write_line


class ModelCheckpoint(Callback):
    """Saves during fit, always or only the best. Arguments as in Keras; on several workers the chief writes.

    With ``save_weights_only``: safetensors files, whole or absent. Without: whole checkpoints, which
    ``model.load_checkpoint`` restores, one folder a step inside ``filepath``.

    Args:
        filepath: the weights file; may hold ``{epoch}`` (from 1), ``{batch}`` (from 1, with an integer ``save_freq``)
            and names of the logs, with formats: ``"weights-{epoch:02d}-{val_loss:.3f}.safetensors"``. Folders are made.
            For whole checkpoints the folder that they are in.
        monitor: the name that says which is best.
        verbose: 1 writes a line for each that is saved.
        save_best_only: save only when ``monitor`` has improved.
        save_weights_only: False saves whole checkpoints.
        mode: "min", "max", or "auto" to let the metric say.
        save_freq: "epoch", or every this many global batches, counted over all epochs. With gradient accumulation a
            whole checkpoint waits for the update.
        initial_value_threshold: the value that the first must beat with ``save_best_only``.
        keep: how many of the last whole checkpoints stay, beside the best by ``monitor`` where the logs have it; None
            keeps all.
        asynchronous: whole checkpoints are written by a thread while training goes on; see ``CheckpointManager``.

    Raises:
        ConfigError: ``filepath`` is empty, ``save_freq`` is neither "epoch" nor a positive integer, or ``keep`` or
            ``asynchronous`` is given for weights alone.

    Example:
        >>> callback = ModelCheckpoint("best.safetensors", monitor="val_loss", save_best_only=True)
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = True,
        mode: Mode = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or isinstance(save_freq, bool) or save_freq < 1):
            raise ConfigError(f"ModelCheckpoint(save_freq={save_freq!r}); give 'epoch' or a number of batches")
        if save_weights_only and (keep is not None or asynchronous):
            raise ConfigError(
                f"ModelCheckpoint(keep={keep!r}, asynchronous={asynchronous!r}) is for whole checkpoints; give "
                "save_weights_only=False, or leave them out"
            )
        self.filepath = given_path(filepath, "ModelCheckpoint(filepath)")
        self.monitor = monitor
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.keep = keep
        self.asynchronous = asynchronous
        self.best = initial_value_threshold
        if not save_weights_only:
            self.comes_after = 1  # so that it saves what others have made of the epoch
        self._watch = Monitor(monitor, mode=mode, owner="ModelCheckpoint")
        self._manager: CheckpointManager | None = None
        self._epoch = 0
        self._batches_seen = 0
        self._due = False

    def wants_batch_logs(self) -> bool:
        """True for the batches after which it saves."""
        return self.save_freq != "epoch" and (self._due or (self._batches_seen + 1) % self.save_freq == 0)

    def on_train_begin(self, logs: Logs) -> None:
        """Learns which direction is better, and where whole checkpoints go."""
        self._watch.begin(self.model.metrics)
        self._batches_seen, self._due = 0, False
        if not self.save_weights_only:
            self._manager = CheckpointManager(
                self.model.checkpoint(),
                self.filepath,
                keep=self.keep,
                best=self._watch.direction,
                asynchronous=self.asynchronous,
            )

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Saves where ``save_freq`` is a number of batches and that many have passed."""
        self._batches_seen += 1
        self._due |= self.save_freq != "epoch" and self._batches_seen % self.save_freq == 0
        if self._due and (self._manager is None or self.model.training_state.at_update):
            self._due = False
            self._save({**logs, "batch": batch + 1}, logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Saves where ``save_freq`` is "epoch", or where a batch's save waits for the last update."""
        if self.save_freq == "epoch" or self._due:
            self._due = False
            self._save(logs, logs)

    def on_train_end(self, logs: Logs) -> None:
        """Waits for a checkpoint that is being written."""
        if self._manager is not None:
            self._manager.close()

    def state_dict(self) -> dict[str, Any]:
        """The best number so far, and the batches counted."""
        return {"best": self.best, "batches": self._batches_seen, "due": self._due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting where ``state_dict`` was taken."""
        check_kind(state, {"best": float | None, "batches": int, "due": bool}, "ModelCheckpoint")
        self.best, self._batches_seen, self._due = state["best"], state["batches"], state["due"]

    def close(self) -> None:
        """Lets a checkpoint that is being written be finished, also after an error."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.finish_writing()

    def _save(self, names: Logs, logs: Logs) -> None:
        if self.save_best_only and not self._improved(logs):
            return
        path = self._save_weights(names) if self._manager is None else self._save_all(self._manager, logs)
        if self.verbose and self.model.strategy.workers.is_chief:
            what = "the weights" if self.save_weights_only else "a checkpoint"
            write_line(f"epoch {self._epoch + 1}: saved {what} to {path}")

    def _save_weights(self, names: Logs) -> Path:
        path = self._path(names)
        self.model.save_weights(path)
        return path

    def _save_all(self, manager: CheckpointManager, logs: Logs) -> Path:
        state = self.model.training_state
        manager.run = state.run
        return manager.save(state.position.step, monitored=logs.get(self.monitor))

    def _improved(self, logs: Logs) -> bool:
        """Whether the monitored number is the best so far; True where it is absent, as in Keras."""
        value = self._watch.read(logs)
        if value is None:
            return True
        better = self._watch.is_better(value, self.best)
        if better:
            self.best = value
        return better

    def _path(self, names: Logs) -> Path:
        values = {**names, "epoch": self._epoch + 1}
        try:
            return Path(self.filepath.format(**values))
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"ModelCheckpoint cannot fill in {self.filepath!r} ({error}); the names are: {', '.join(values)}"
            ) from error
