from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.weights import read_weights
from lockstep.errors import CallbackError, ConfigError
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


def test_an_absent_name_warns_and_saves_as_keras_does(model: Model, tmp_path: Path):
    path = tmp_path / "best.safetensors"

    with pytest.warns(
        UserWarning, match="ModelCheckpoint monitors 'val_accuracy', which the logs lack; they have: val"
    ):
        play(model, ModelCheckpoint(path, monitor="val_accuracy", mode="max", save_best_only=True), [3.0])

    assert path.exists()


def test_a_number_of_batches_counts_over_the_epochs(model: Model, batches: Batches, tmp_path: Path):
    callback = ModelCheckpoint(tmp_path / "w-{epoch}-{batch}-{loss:.0f}.st", save_freq=2)

    model.fit(batches, epochs=2, callbacks=[callback], verbose=0)

    assert [name[:5] for name in names(tmp_path)] == ["w-1-2", "w-2-1", "w-2-3"]


def test_the_saved_file_is_named_on_request(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    play(model, ModelCheckpoint(tmp_path / "w.safetensors", verbose=1), [3.0])

    assert capsys.readouterr().out == f"epoch 1: saved the weights to {tmp_path / 'w.safetensors'}\n"


def test_a_name_that_the_logs_lack_lists_those_that_exist(model: Model, batches: Batches, tmp_path: Path):
    callback = ModelCheckpoint(tmp_path / "{val_loss}.safetensors")

    with pytest.raises(CallbackError, match=r"cannot fill in .*\('val_loss'\); the names are: loss, epoch"):
        model.fit(batches, callbacks=[callback], verbose=0)

    assert names(tmp_path) == []


@pytest.mark.parametrize("save_freq", [0, -1, 1.5, True, "batch"])
def test_an_unknown_frequency_is_refused(save_freq: Any):
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(save_freq=.*\); give 'epoch' or a number of batches"):
        ModelCheckpoint("w", save_freq=save_freq)


def test_whole_models_are_refused():
    with pytest.raises(ConfigError, match=r"save_weights_only=False\): it saves nothing but weights"):
        ModelCheckpoint("w", save_weights_only=False)


def test_metrics_are_asked_for_only_when_it_saves(tmp_path: Path):
    assert not ModelCheckpoint(tmp_path / "w").wants_batch_logs()
    assert ModelCheckpoint(tmp_path / "w", save_freq=1).wants_batch_logs()
    assert not ModelCheckpoint(tmp_path / "w", save_freq=2).wants_batch_logs()
    assert not LambdaCallback().wants_batch_logs()
