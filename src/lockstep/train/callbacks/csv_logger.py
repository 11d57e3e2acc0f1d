"""CSVLogger: one line per epoch in a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from lockstep.checkpoint.format import check_kind
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.callbacks.given_path import given_path


class CSVLogger(Callback):
    """Writes the logs of every epoch to a CSV file, flushed after each line. Arguments as in Keras.

    The columns are ``epoch`` and the sorted names of the first epoch's logs. With validation every name has its
    ``val_`` column, which holds NA where an epoch was not validated. A name that appears only later has no column.

    Args:
        filename: the file; its folder is made.
        separator: between the fields.
        append: go on in an existing file instead of writing it anew, as a training that is resumed should.

    Raises:
        ConfigError: ``filename`` is empty.

    Example:
        >>> callback = CSVLogger("log.csv")
    """

    chief_only = True

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.filename = Path(given_path(filename, "CSVLogger(filename)"))
        self.separator = separator
        self.append = append
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_train_begin(self, logs: Logs) -> None:
        """Opens the file, and reads the columns of one that is continued."""
        self.filename.parent.mkdir(parents=True, exist_ok=True)
        self._columns = self._existing_columns() if self.append else []
        self._file = self.filename.open("a" if self.append else "w", newline="", encoding="utf-8")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Writes the epoch's line, and the head before the first."""
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
        """How long the file is."""
        return {"bytes": self._file.tell()} if self._file is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cuts off, with ``append``, the lines of epochs that are trained once more."""
        check_kind(state, {"bytes": int} if state else dict, "CSVLogger")
        if self.append and self._file is not None and self._file.tell() > state["bytes"]:
            self._file.truncate(state["bytes"])
            self._columns = self._existing_columns()

    def close(self) -> None:
        """Closes the file."""
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
