from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.weights import read_weights
from lockstep.errors import CallbackError, CheckpointError, ConfigError
from lockstep.train.callbacks import LambdaCallback, ModelCheckpoint
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_weights_of_every_epoch_are_saved_under_names_from_the_logs(model: Model, batches: Batches, tmp_path: Path):
    path = tmp_path / "deep" / "w-{epoch:02d}-{val_loss:.2f}.safetensors"
    history = model.fit(batches, validation_data=batches, epochs=2, callbacks=[ModelCheckpoint(path)], verbose=0)
    losses = history.history["val_loss"]
    assert names(tmp_path / "deep") == sorted(f"w-{n:02d}-{loss:.2f}.safetensors" for n, loss in enumerate(losses, 1))
    last = read_weights(tmp_path / "deep" / f"w-02-{losses[1]:.2f}.safetensors")
    assert torch.equal(last["weight"], model.module.weight)


def play(model: Model, callback: ModelCheckpoint, values: list[float]) -> None:
    """Feeds epochs to the callback whose weights are the number of the epoch."""
    callback.set_model(model)
    callback.on_train_begin({})
    for epoch, value in enumerate(values):
        with torch.no_grad():
            model.module.weight.fill_(float(epoch))
        callback.on_epoch_begin(epoch, {})
        callback.on_epoch_end(epoch, {"val_loss": value})


@pytest.mark.parametrize(
    ("arguments", "values", "kept"),
    [
        ({}, [3.0, 1.0, 2.0], 1.0),
        ({"mode": "max"}, [3.0, 1.0, 2.0], 0.0),
        ({"initial_value_threshold": 2.5}, [3.0, 2.0, 2.2], 1.0),
        ({}, [float("nan"), 2.0, float("nan")], 1.0),
    ],
)
def test_only_the_best_is_kept(
    model: Model, tmp_path: Path, arguments: dict[str, Any], values: list[float], kept: float
):
    path = tmp_path / "best.safetensors"
    play(model, ModelCheckpoint(path, save_best_only=True, **arguments), values)
    assert read_weights(path)["weight"].tolist() == [[kept] * 3]


def test_an_absent_name_is_refused(model: Model, tmp_path: Path):
    path = tmp_path / "best.safetensors"
    with pytest.raises(ConfigError, match="ModelCheckpoint monitors 'accuracy', which the logs lack; they have: val"):
        play(model, ModelCheckpoint(path, monitor="accuracy", mode="max", save_best_only=True), [3.0])
    assert not path.exists()


def test_a_number_of_batches_counts_over_the_epochs(model: Model, batches: Batches, tmp_path: Path):
    callback = ModelCheckpoint(tmp_path / "w-{epoch}-{batch}-{loss:.0f}.st", save_freq=2)
    model.fit(batches, epochs=2, callbacks=[callback], verbose=0)
    assert [name[:5] for name in names(tmp_path)] == ["w-1-2", "w-2-1", "w-2-3"]


def test_the_saved_file_is_named_on_request(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    play(model, ModelCheckpoint(tmp_path / "w.safetensors", verbose=1), [3.0])
    assert capsys.readouterr().out == f"epoch 1: saved the weights to {tmp_path / 'w.safetensors'}\n"


def test_a_name_that_the_logs_lack_lists_those_that_exist(model: Model, batches: Batches, tmp_path: Path):
    callback = ModelCheckpoint(tmp_path / "{val_loss}.safetensors")
    with pytest.raises(
        CallbackError, match=r"cannot fill in .*\('val_loss'\); the names are: loss, learning_rate, epoch"
    ):
        model.fit(batches, callbacks=[callback], verbose=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize("save_freq", [0, -1, 1.5, True, "batch"])
def test_an_unknown_frequency_is_refused(save_freq: Any):
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(save_freq=.*\); give 'epoch' or a number of batches"):
        ModelCheckpoint("w", save_freq=save_freq)


def test_whole_checkpoints_are_restored_by_load_checkpoint(model: Model, batches: Batches, tmp_path: Path):
    module = model.module
    model.compile(torch.optim.Adam(module.parameters(), 0.05), torch.nn.functional.mse_loss)
    whole = model.fit(batches, validation_data=batches, epochs=3, callbacks=[saving(tmp_path, keep=2)], verbose=0)
    assert names(tmp_path) == ["step-00000006", "step-00000009"]
    expected = module.weight.clone()

    position = model.load_checkpoint(tmp_path / "step-00000006")
    assert (position.epoch, position.batch, position.step) == (2, 0, 6)
    assert not torch.equal(module.weight, expected)
    again = model.fit(
        batches,
        validation_data=batches,
        epochs=3,
        initial_epoch=position.epoch,
        callbacks=[saving(tmp_path, keep=2)],
        verbose=0,
    )

    assert torch.equal(module.weight, expected)
    assert again.history["loss"] == whole.history["loss"][2:]
    assert again.epoch == again.logged_in["val_loss"] == [2]
    assert names(tmp_path) == ["step-00000006", "step-00000009"]
    model.load_weights(tmp_path / "step-00000006" / "weights.safetensors")


def saving(folder: Path, **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_weights_only=False, **arguments)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_and_the_best_whole_checkpoints_stay(
    model: Model, batches: Batches, tmp_path: Path, asynchronous: bool
):
    rates = iter([0.05, 0.001, 3.0, 0.1])  # with the third the loss goes up

    def step(epoch: int, logs: Any) -> None:
        assert model.optimizer is not None
        model.optimizer.param_groups[0]["lr"] = next(rates)

    callbacks = [LambdaCallback(on_epoch_begin=step), saving(tmp_path, keep=1, asynchronous=asynchronous)]
    history = model.fit(batches, validation_data=batches, epochs=4, callbacks=callbacks, verbose=0)

    best = history.history["val_loss"].index(min(history.history["val_loss"]))
    assert best == 1
    assert names(tmp_path) == ["step-00000006", "step-00000012"]


def test_whole_checkpoints_wait_for_the_update(model: Model, batches: Batches, tmp_path: Path):
    model.compile(torch.optim.SGD(model.module.parameters(), 0.05), torch.nn.functional.mse_loss, accumulate=2)
    model.fit(batches, epochs=2, callbacks=[saving(tmp_path, save_freq=1, monitor="loss")], verbose=0)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (2, 3, 5, 6)]


def test_a_fresh_run_does_not_write_beneath_later_checkpoints_of_another(
    model: Model, batches: Batches, tmp_path: Path
):
    model.fit(batches, epochs=2, callbacks=[saving(tmp_path, monitor="loss")], verbose=0)
    model.training_state.run = "another"
    model.training_state._position = type(model.training_state.position)()
    with pytest.raises(CheckpointError, match=r"another run has left step-00000006 there.*choose an empty folder"):
        model.fit(batches, epochs=2, callbacks=[saving(tmp_path, monitor="loss")], verbose=0)


@pytest.mark.parametrize("arguments", [{"keep": 3}, {"asynchronous": True}])
def test_what_is_for_whole_checkpoints_is_refused_for_weights(arguments: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(keep=.*is for whole checkpoints; give save_weights"):
        ModelCheckpoint("w", **arguments)


def test_metrics_are_asked_for_only_when_it_saves(model: Model, tmp_path: Path):
    for save_freq, wants in (("epoch", False), (1, True), (2, False)):
        callback = ModelCheckpoint(tmp_path / "w", save_freq=save_freq)  # type: ignore[arg-type]
        callback.set_model(model)
        assert callback.wants_batch_logs() is wants
    assert not LambdaCallback().wants_batch_logs()
