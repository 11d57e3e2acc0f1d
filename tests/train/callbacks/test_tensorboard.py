from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.train.conftest import compiled
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

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


def tracks(path: Path) -> dict[str, set[str]]:
    """The operators on each named track of a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    found: dict[str, set[str]] = {}
    for event in events:
        if event.get("ph") == "X":
            found.setdefault(names.get(event["tid"], str(event["tid"])), set()).add(event["name"])
    return found


def test_a_profile_has_a_track_for_each_replica(make_strategy: Callable[..., Any], batches: Batches, tmp_path: Path):
    earlier = make_strategy(3)  # at whose threads' addresses the system starts those of the next strategy
    with profile(activities=[ProfilerActivity.CPU]):
        earlier.run(lambda: torch.ones(1) + 1)
    earlier.close()
    model = compiled(nn.Linear(3, 1), make_strategy(3), "sgd", "mse")
    callback = TensorBoard(tmp_path, profile_batch=(2, 4))
    model.fit(batches[:2], epochs=3, callbacks=[callback], verbose=0)

    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "worker-0.4.pt.trace.json"
    found = tracks(path)
    for replica in range(3):
        operators = found[f"replica {replica} (cpu:{replica})"]
        assert {"aten::addmm", "aten::mse_loss"} <= operators
        assert any("Backward" in name for name in operators)
    steps = {name for names in found.values() for name in names if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}
    assert not any(name.startswith("thread") and "aten::addmm" in names for name, names in found.items())


def test_a_training_that_ends_early_leaves_its_profile_and_one_that_fails_none(
    model: Model, batches: Batches, tmp_path: Path
):
    model.fit(batches, callbacks=[TensorBoard(tmp_path, profile_batch=(2, 99))], verbose=0)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["worker-0.3.pt.trace.json"]

    def fail(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    failing = LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches, callbacks=[failing, TensorBoard(tmp_path / "b", profile_batch=(4, 5))], verbose=0)
    assert not (tmp_path / "b" / "profile").exists()
    assert not torch.autograd._profiler_enabled()


def test_histograms_are_written_every_few_epochs(model: Model, batches: Batches, tmp_path: Path):
    model.fit(batches, epochs=3, callbacks=[TensorBoard(tmp_path, histogram_freq=2)], verbose=0)
    events = EventAccumulator(str(tmp_path / "train"), size_guidance={"histograms": 0})
    events.Reload()
    assert events.Tags()["histograms"] == ["weight", "bias"]
    assert [event.step for event in events.Histograms("weight")] == [0, 2]
    last = events.Histograms("weight")[-1].histogram_value
    assert (last.num, last.sum) == (3, pytest.approx(model.module.weight.sum().item()))


@pytest.mark.parametrize("profile_batch", [-1, (3, 2), (1, 2, 3), "2", True, (0, 4)])
def test_batches_that_cannot_be_profiled_are_refused(profile_batch: Any):
    with pytest.raises(ConfigError, match=r"TensorBoard\(profile_batch\)=.*such as \(10, 12\)"):
        TensorBoard("logs", profile_batch=profile_batch)
