from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.train.callbacks import BackupAndRestore, Callback, LambdaCallback, TensorBoard
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_the_scalars_of_every_epoch_can_be_read_back(model: Model, batches: Batches, tmp_path: Path):
    history = model.fit(batches, validation_data=batches, epochs=2, callbacks=[TensorBoard(tmp_path)], verbose=0)

    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(train) == {"epoch_loss", "epoch_learning_rate", "epoch_examples_per_s", "epoch_step_ms"}
    assert train["epoch_loss"] == pytest.approx(dict(enumerate(history.history["loss"])))
    assert train["epoch_learning_rate"] == pytest.approx({0: 0.05, 1: 0.05})
    assert train["epoch_examples_per_s"][0] == pytest.approx(history.timing[0].examples_per_s)
    assert validation == {"epoch_loss": pytest.approx(dict(enumerate(history.history["val_loss"])))}


@pytest.mark.parametrize(("update_freq", "steps"), [("batch", [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])])
def test_batches_are_written_as_often_as_asked(
    model: Model, batches: Batches, tmp_path: Path, update_freq: Any, steps: list[int]
):
    model.fit(batches, epochs=2, callbacks=[TensorBoard(tmp_path, update_freq=update_freq)], verbose=0)

    assert list(scalars(tmp_path / "train")["batch_loss"]) == steps


def test_a_resumed_training_goes_on_in_its_folder(logged_fit: Callable[..., Any], tmp_path: Path):
    def callbacks(folder: str) -> list[Callback]:
        return [TensorBoard(tmp_path / folder, update_freq=1), BackupAndRestore(tmp_path / "backup")]

    logged_fit(*callbacks("monday"), interrupted_in=1)  # after a batch that the backup does not hold
    assert list(scalars(tmp_path / "monday" / "train")["batch_loss"]) == [1, 2, 3, 4]
    for file in (tmp_path / "monday").rglob("events.*"):  # as of an earlier second, since readers sort them by name
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    logged_fit(*callbacks("tuesday"))

    events = EventAccumulator(str(tmp_path / "monday" / "train"))
    events.Reload()
    assert [event.step for event in events.Scalars("batch_loss")] == [1, 2, 3, 4, 5, 6]  # the 4 is not there twice
    assert list(scalars(tmp_path / "monday" / "validation")["epoch_loss"]) == [0, 1]
    assert not (tmp_path / "tuesday").exists()


def test_the_files_are_closed_after_an_error(model: Model, batches: Batches, tmp_path: Path):
    threads = threading.active_count()

    def stop(epoch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(batches, callbacks=[TensorBoard(tmp_path), LambdaCallback(on_epoch_end=stop)], verbose=0)

    assert threading.active_count() == threads  # the writer's own thread has ended
    assert len(scalars(tmp_path / "train")["epoch_loss"]) == 1


@pytest.mark.parametrize("update_freq", [0, "step", 1.5, True])
def test_an_unknown_frequency_is_refused(update_freq: Any):
    with pytest.raises(
        ConfigError, match=r"TensorBoard\(update_freq=.*\) is unknown; give 'epoch', 'batch' or a number"
    ):
        TensorBoard("logs", update_freq=update_freq)
