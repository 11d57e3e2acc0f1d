from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import CallbackError, ConfigError
from lockstep.train.callbacks import EarlyStopping, LambdaCallback
from lockstep.train.model import Model


def play(model: Model, callback: EarlyStopping, values: list[float], name: str = "val_loss") -> int:
    """Feeds the epochs' values to the callback; returns how many epochs ran."""
    model.stop_training = False
    callback.set_model(model)
    callback.on_train_begin({})
    epochs = 0
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {name: value})
        epochs += 1
        if model.stop_training:
            break
    callback.on_train_end({})
    callback.close()
    return epochs


@pytest.mark.parametrize(
    ("arguments", "values", "epochs"),
    [
        ({}, [3.0, 2.0, 2.5, 1.0], 3),
        ({"patience": 1}, [3.0, 2.0, 2.5, 1.0], 3),
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.4, 1.0], 4),
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.9, 2.0, 2.0, 0.0], 6),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.6, 1.0], 3),
        ({"patience": 2, "mode": "max"}, [1.0, 2.0, 1.0, 1.0, 3.0], 4),
        ({"patience": 2, "baseline": 1.0}, [3.0, 2.0, 1.5, 2.0, 0.5], 4),
        ({"start_from_epoch": 2}, [3.0, 4.0, 5.0, 4.0, 4.5, 0.0], 5),
        ({"patience": 1}, [float("nan"), float("nan"), 1.0], 2),
    ],
)
def test_it_stops_when_keras_would(model: Model, arguments: dict[str, Any], values: list[float], epochs: int):
    callback = EarlyStopping(**arguments)
    assert play(model, callback, values) == epochs
    assert callback.stopped_epoch == epochs - 1


def test_an_instance_serves_several_runs(model: Model):
    callback = EarlyStopping()
    assert play(model, callback, [1.0, 2.0]) == 2
    assert play(model, callback, [5.0, 4.0, 3.0]) == 3
    assert callback.stopped_epoch == 0


def test_the_best_weights_come_back(model: Model):
    weight = model.module.weight
    callback = EarlyStopping(patience=2, restore_best_weights=True)
    callback.set_model(model)
    callback.on_train_begin({})
    for epoch, value in enumerate([3.0, 1.0, 2.0, 2.0]):
        with torch.no_grad():
            weight.fill_(float(epoch))
        callback.on_epoch_end(epoch, {"val_loss": value})
    callback.on_train_end({})

    assert (callback.best_epoch, callback.best) == (1, 1.0)
    assert model.module.weight is weight
    assert weight.tolist() == [[1.0, 1.0, 1.0]]


def test_without_asking_the_last_weights_stay(model: Model):
    before = model.module.weight.clone()
    play(model, EarlyStopping(), [1.0, 2.0])
    assert torch.equal(model.module.weight, before)


def test_it_says_what_it_did(model: Model, capsys: pytest.CaptureFixture[str]):
    play(model, EarlyStopping(verbose=1, restore_best_weights=True), [1.0, 2.0])
    play(model, EarlyStopping(verbose=1), [1.0, 2.0])
    play(model, EarlyStopping(verbose=1, patience=5, restore_best_weights=True), [1.0, 2.0])
    play(model, EarlyStopping(), [1.0, 2.0])  # in a silent fit

    assert capsys.readouterr().out.splitlines() == [
        "epoch 2: early stopping, best val_loss 1 in epoch 1, whose weights are restored",
        "epoch 2: early stopping, best val_loss 1 in epoch 1, whose weights are not restored",
        "the weights are those of epoch 1: val_loss 1",
    ]


def test_a_fit_that_is_not_silent_says_that_it_was_stopped(
    model: Model, batches: list[tuple[Tensor, Tensor]], capsys: pytest.CaptureFixture[str]
):
    model.fit(batches, epochs=4, callbacks=[EarlyStopping("loss", mode="max")], verbose=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "early stopping" in line]
    assert len(lines) == 1
    assert lines[0].startswith("epoch 2: early stopping, best loss ")


def test_a_negative_patience_is_refused():
    with pytest.raises(ConfigError, match=r"EarlyStopping\(patience\)=-1 was given, expected at least 0"):
        EarlyStopping(patience=-1)


@pytest.mark.parametrize(("monitor", "validated"), [("val_loss", False), ("accuracy", True), ("val_accuracy", True)])
def test_an_absent_name_is_an_error_before_the_first_epoch_with_those_that_there_will_be(
    model: Model, batches: list[tuple[Tensor, Tensor]], monitor: str, validated: bool
):
    begun: list[int] = []
    count = LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    stopping = EarlyStopping(monitor, mode="min")

    with pytest.raises(CallbackError) as caught:
        model.fit(
            batches, validation_data=batches if validated else None, epochs=3, callbacks=[count, stopping], verbose=0
        )

    assert begun == []
    assert isinstance(caught.value.__cause__, ConfigError)
    assert repr(monitor) in str(caught.value)
    names = "loss, val_loss, learning_rate" if validated else "loss, learning_rate"
    assert f"they will have: {names}." in str(caught.value)


def test_epochs_without_a_validation_are_passed_over(model: Model, batches: list[tuple[Tensor, Tensor]]):
    history = model.fit(
        batches, validation_data=batches, epochs=5, callbacks=[EarlyStopping()], validation_freq=2, verbose=0
    )
    assert history.epoch == [0, 1, 2, 3, 4]
    assert len(history.history["val_loss"]) == 2


def test_fit_ends_early_and_has_the_weights_of_the_best_epoch(model: Model, batches: list[tuple[Tensor, Tensor]]):
    seen: list[Tensor] = []

    def disturb(epoch: int, logs: Any) -> None:
        seen.append(model.module.weight.detach().clone())
        with torch.no_grad():  # from the third epoch on the weights are far off
            model.module.weight.add_(100.0 if epoch >= 1 else 0.0)

    stopping = EarlyStopping("loss", patience=2, restore_best_weights=True)
    history = model.fit(batches, epochs=9, callbacks=[stopping, LambdaCallback(on_epoch_end=disturb)], verbose=0)

    assert len(history.epoch) == 4
    assert stopping.best_epoch == 1
    assert torch.equal(model.module.weight, seen[1])
