from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep.errors import CallbackError
from lockstep.train.callbacks import BackupAndRestore, CSVLogger, LambdaCallback
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def rows(path: Path, separator: str = ",") -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=separator))


def is_open(path: Path) -> bool:
    return any(link.resolve() == path.resolve() for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_every_epoch_is_a_line(model: Model, batches: Batches, tmp_path: Path):
    path = tmp_path / "logs" / "log.csv"
    history = model.fit(batches, validation_data=batches, epochs=2, callbacks=[CSVLogger(path, ";")], verbose=0)
    written = rows(path, ";")
    assert list(written[0]) == ["epoch", "learning_rate", "loss", "val_loss"]
    assert [row["epoch"] for row in written] == ["0", "1"]
    assert [float(row["loss"]) for row in written] == history.history["loss"]
    assert [float(row["val_loss"]) for row in written] == history.history["val_loss"]
    assert not is_open(path)


def test_a_line_is_in_the_file_as_soon_as_its_epoch_ends(model: Model, batches: Batches, tmp_path: Path):
    path = tmp_path / "log.csv"
    lengths: list[int] = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: lengths.append(len(rows(path))))
    model.fit(batches, epochs=2, callbacks=[CSVLogger(path), look], verbose=0)
    assert lengths == [1, 2]


def test_an_epoch_without_validation_has_na(model: Model, batches: Batches, tmp_path: Path):
    path = tmp_path / "log.csv"
    model.fit(batches, validation_data=batches, epochs=2, validation_freq=2, callbacks=[CSVLogger(path)], verbose=0)
    assert [row["val_loss"] == "NA" for row in rows(path)] == [True, False]


@pytest.mark.parametrize(("append", "epochs"), [(True, ["0", "1"]), (False, ["1"])])
def test_a_file_is_continued_or_written_anew(
    model: Model, batches: Batches, tmp_path: Path, append: bool, epochs: list[str]
):
    path = tmp_path / "log.csv"
    model.fit(batches, callbacks=[CSVLogger(path)], verbose=0)
    model.fit(batches, initial_epoch=1, epochs=2, callbacks=[CSVLogger(path, append=append)], verbose=0)
    assert [row["epoch"] for row in rows(path)] == epochs


def test_a_file_that_a_spreadsheet_has_saved_is_continued(model: Model, batches: Batches, tmp_path: Path):
    path = tmp_path / "log.csv"
    model.fit(batches, callbacks=[CSVLogger(path)], verbose=0)
    path.write_text(path.read_text(), encoding="utf-8-sig", newline="\r\n")
    model.fit(batches, initial_epoch=1, epochs=2, callbacks=[CSVLogger(path, append=True)], verbose=0)
    with path.open(encoding="utf-8-sig", newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]


def stop_in_epoch_2(error: BaseException) -> LambdaCallback:
    def stop(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise error

    return LambdaCallback(on_epoch_begin=stop)


@pytest.mark.parametrize(("error", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (ValueError(), CallbackError)])
def test_the_file_is_whole_and_closed_however_fit_ends(
    model: Model, batches: Batches, tmp_path: Path, error: BaseException, raised: type[BaseException]
):
    path = tmp_path / "log.csv"
    with pytest.raises(raised):
        model.fit(batches, epochs=3, callbacks=[CSVLogger(path), stop_in_epoch_2(error)], verbose=0)
    assert [row["epoch"] for row in rows(path)] == ["0"]
    assert not is_open(path)


def test_a_resumed_training_writes_no_epoch_twice(model: Model, batches: Batches, tmp_path: Path):
    log, backup = tmp_path / "log.csv", tmp_path / "backup"

    def fail(epoch: int, logs: Any) -> None:
        raise ValueError  # after the logger has written the line of the epoch, and before the backup is saved

    callbacks = [CSVLogger(log, append=True), BackupAndRestore(backup, 1), LambdaCallback(on_epoch_end=fail)]
    with pytest.raises(CallbackError, match="ValueError"):
        model.fit(batches, epochs=3, callbacks=callbacks, verbose=0)
    assert len(log.read_text().splitlines()) == 2
    model.fit(batches, epochs=3, callbacks=[CSVLogger(log, append=True), BackupAndRestore(backup, 1)], verbose=0)

    assert [line.split(",")[0] for line in log.read_text().splitlines()] == ["epoch", "0", "1", "2"]
