"""CSVLogger and TensorBoard: callbacks that write the logs to files."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.train.callbacks.base import Callback, Logs, check_path


class CSVLogger(Callback):
    """Writes the logs of every epoch to a CSV file, flushed after each line. Arguments as in Keras.

    The columns are ``epoch`` and the sorted names of the first epoch's logs. With validation every name has its
    ``val_`` column, which holds NA where an epoch was not validated. A name that appears only later has no column.

    Args:
        filename: the file; its folder is made.
        separator: between the fields.
        append: go on in an existing file instead of writing it anew, as a training that is resumed should.

    Example:
        >>> callback = CSVLogger("log.csv")
    """

    chief_only = True

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.filename = Path(check_path(filename, "CSVLogger(filename)"))
        self.separator = separator
        self.append = append
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_train_begin(self, logs: Logs) -> None:
        self.filename.parent.mkdir(parents=True, exist_ok=True)
        self._columns = self._existing_columns() if self.append else []
        self._file = self.filename.open("a" if self.append else "w", newline="", encoding="utf-8")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._file is None:
            return
        writer = csv.writer(self._file, delimiter=self.separator, lineterminator="\n")
        if not self._columns:
            self._columns = ["epoch", *self._names(logs)]
            writer.writerow(self._columns)
        row = {"epoch": epoch, **logs}
        writer.writerow([row.get(column, "NA") for column in self._columns])
        self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._file.tell()} if self._file is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.append and self._file is not None and self._file.tell() > state["bytes"]:
            self._file.truncate(state["bytes"])
            self._columns = self._existing_columns()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _names(self, logs: Logs) -> list[str]:
        names = set(logs)
        if self.params.get("validated"):
            names |= {f"val_{name}" for name in logs if not name.startswith("val_")}
        return sorted(names)

    def _existing_columns(self) -> list[str]:
        if not self.filename.exists():
            return []
        with self.filename.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file, delimiter=self.separator), [])


UpdateFreq = Literal["epoch", "batch"] | int


class TensorBoard(Callback):
    """Writes scalars for TensorBoard, in the folders and with the names that Keras uses.

    ``log_dir/train`` and ``log_dir/validation`` hold ``epoch_loss`` and one ``epoch_<metric>`` each; ``train`` also
    ``epoch_learning_rate``, ``epoch_examples_per_s`` and, of the chief's GPUs, ``memory_mb/gpu_0/in_use`` (of tensors),
    ``reserved``, ``peak`` and ``limit``; with another ``update_freq``, ``batch_loss`` and so on.

    Args:
        log_dir: the folder; look at it with ``tensorboard --logdir``.
        update_freq: "epoch", "batch", or every this many global batches.

    Example:
        >>> callback = TensorBoard("logs")
    """

    chief_only = True

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", update_freq: UpdateFreq = "epoch") -> None:
        super().__init__()
        every = {"epoch": 0, "batch": 1}.get(update_freq) if isinstance(update_freq, str) else update_freq
        if type(every) is not int or every < 0 or update_freq == 0:
            raise ConfigError(f"TensorBoard(update_freq={update_freq!r}) is unknown; give 'epoch', 'batch' or a number")
        self.log_dir = Path(check_path(log_dir, "TensorBoard(log_dir)"))
        self.update_freq = update_freq
        self._every = every  # batches; 0 for epochs
        self._step = 0
        self._writers: dict[str, Any] = {}

    def wants_batch_logs(self) -> bool:
        return self._every > 0 and (self._step + 1) % self._every == 0

    def on_train_begin(self, logs: Logs) -> None:
        self._step = 0
        self._writer("train")

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        wanted = self.wants_batch_logs()
        self._step += 1
        if wanted:
            for name, value in logs.items():
                self._writer("train").add_scalar(f"batch_{name}", value, self._step)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        for name, value in logs.items():
            run = "validation" if name.startswith("val_") else "train"
            self._writer(run).add_scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)
        train = self._writer("train")
        train.add_scalar("epoch_learning_rate", self.model.learning_rate, epoch)
        train.add_scalar("epoch_examples_per_s", self.model.clock.summary().examples_per_s, epoch)
        for memory in self.model.strategy.device_memory():
            of = f"memory_mb/{memory.name.replace(':', '_')}"  # TensorBoard takes no colon
            for what, size in memory.sizes_mb().items():
                train.add_scalar(f"{of}/{what}", size, epoch)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            module = require("torch.utils.tensorboard", "train")
            self._writers[run] = module.SummaryWriter(str(self.log_dir / run))
        return self._writers[run]
