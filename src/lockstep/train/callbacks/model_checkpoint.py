"""ModelCheckpoint: writes the weights at the end of epochs or every so many batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.callbacks.monitor import Mode, Monitor
from lockstep.train.callbacks.progress import write_line


class ModelCheckpoint(Callback):
    """Saves the weights during fit, all or only the best; safetensors files, whole or absent. Arguments as in Keras.

    Args:
        filepath: where to; may hold ``{epoch}`` (from 1), ``{batch}`` (from 1, with an integer ``save_freq``) and names
            of the logs, with formats: ``"weights-{epoch:02d}-{val_loss:.3f}.safetensors"``. Folders are made.
        monitor: the name that says which is best.
        verbose: 1 writes a line for each file.
        save_best_only: save only when ``monitor`` has improved.
        save_weights_only: True; there is no other kind of file.
        mode: "min", "max", or "auto" to let the metric say.
        save_freq: "epoch", or every this many global batches, counted over all epochs.
        initial_value_threshold: the value that the first file must beat with ``save_best_only``.

    Raises:
        ConfigError: ``save_freq`` is neither "epoch" nor a positive integer, or ``save_weights_only`` is False.

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
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or isinstance(save_freq, bool) or save_freq < 1):
            raise ConfigError(f"ModelCheckpoint(save_freq={save_freq!r}); give 'epoch' or a number of batches")
        if not save_weights_only:
            raise ConfigError("ModelCheckpoint(save_weights_only=False): it saves nothing but weights; leave it True")
        self.filepath = os.fspath(filepath)
        self.monitor = monitor
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_freq = save_freq
        self.best = initial_value_threshold
        self._watch = Monitor(monitor, mode=mode, owner="ModelCheckpoint")
        self._epoch = 0
        self._batches_seen = 0

    def wants_batch_logs(self) -> bool:
        """True for the batches after which it saves."""
        return self.save_freq != "epoch" and (self._batches_seen + 1) % self.save_freq == 0

    def on_train_begin(self, logs: Logs) -> None:
        """Learns which direction is better."""
        self._watch.begin(self.model.metrics)
        self._batches_seen = 0

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Saves where ``save_freq`` is a number of batches and that many have passed."""
        self._batches_seen += 1
        if self.save_freq != "epoch" and self._batches_seen % self.save_freq == 0:
            self._save({**logs, "batch": batch + 1}, logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Saves where ``save_freq`` is "epoch"."""
        if self.save_freq == "epoch":
            self._save(logs, logs)

    def _save(self, names: Logs, logs: Logs) -> None:
        if self.save_best_only and not self._improved(logs):
            return
        path = self._path(names)
        self.model.save_weights(path)
        if self.verbose:
            write_line(f"epoch {self._epoch + 1}: saved the weights to {path}")

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
