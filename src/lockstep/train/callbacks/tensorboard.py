"""TensorBoard: the logs as scalars that TensorBoard draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.callbacks.given_path import given_path

UpdateFreq = Literal["epoch", "batch"] | int


class TensorBoard(Callback):
    """Writes scalars for TensorBoard, in the folders and with the names that Keras uses.

    ``log_dir/train`` and ``log_dir/validation`` hold ``epoch_loss`` and one ``epoch_<metric>`` each; ``train`` also
    ``epoch_learning_rate`` and ``epoch_examples_per_s``; with another ``update_freq``, ``batch_loss`` and so on. Of the
    chief's GPUs and their shares, ``train`` has each epoch's ``memory_mb/gpu_0/in_use`` (of tensors), ``reserved``,
    ``peak`` (of ``reserved``) and, where there is one, ``limit``.

    Args:
        log_dir: the folder; look at it with ``tensorboard --logdir``.
        update_freq: "epoch", "batch", or every this many global batches.

    Raises:
        ConfigError: ``log_dir`` is empty, or ``update_freq`` is none of these.
        MissingExtraError: when training begins and tensorboard is not installed.

    Example:
        >>> callback = TensorBoard("logs")
    """

    chief_only = True

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", update_freq: UpdateFreq = "epoch") -> None:
        super().__init__()
        known = update_freq in ("epoch", "batch") or (type(update_freq) is int and update_freq > 0)
        if not known:
            raise ConfigError(f"TensorBoard(update_freq={update_freq!r}) is unknown; give 'epoch', 'batch' or a number")
        self.log_dir = Path(given_path(log_dir, "TensorBoard(log_dir)"))
        self.update_freq = update_freq
        self._every = {"epoch": 0, "batch": 1}.get(str(update_freq)) if isinstance(update_freq, str) else update_freq
        self._step = 0
        self._writers: dict[str, Any] = {}

    def wants_batch_logs(self) -> bool:
        """True for the batches that are written."""
        return bool(self._every) and (self._step + 1) % int(self._every or 1) == 0

    def on_train_begin(self, logs: Logs) -> None:
        """Opens the writer of the training part."""
        self._step = 0
        self._writer("train")

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Writes the batch's scalars where ``update_freq`` asks for them."""
        wanted = self.wants_batch_logs()
        self._step += 1
        if wanted:
            for name, value in logs.items():
                self._writer("train").add_scalar(f"batch_{name}", value, self._step)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Writes the epoch's scalars and flushes them."""
        for name, value in logs.items():
            run = "validation" if name.startswith("val_") else "train"
            self._writer(run).add_scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)
        train = self._writer("train")
        train.add_scalar("epoch_learning_rate", self.model.learning_rate, epoch)
        train.add_scalar("epoch_examples_per_s", self.model.clock.examples_per_s, epoch)
        for memory in self.model.strategy.device_memory():
            of = f"memory_mb/{memory.name.replace(':', '_')}"  # TensorBoard takes no colon
            for what, size in memory.sizes_mb().items():
                train.add_scalar(f"{of}/{what}", size, epoch)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            module = require("torch.utils.tensorboard", "train")
            self._writers[run] = module.SummaryWriter(str(self.log_dir / run))
        return self._writers[run]
