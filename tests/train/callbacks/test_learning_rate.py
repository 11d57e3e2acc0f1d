"""The callbacks of the learning rate, and TerminateOnNaN, beside hand-written loops and Keras's published behaviour."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_close, train
from tests.train.conftest import MakeStrategy, compiled, equal, slow_sgd, weights
from torch import Tensor, nn

from lockstep.errors import CallbackError, ConfigError, NonFiniteLossError, UsageError
from lockstep.train.callbacks import (
    BackupAndRestore,
    LambdaCallback,
    LearningRateScheduler,
    ReduceLROnPlateau,
    TerminateOnNaN,
)
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def halved(epoch: int, rate: float) -> float:
    return rate / 2 if epoch else rate


def test_the_schedule_sets_the_rate_of_each_epoch(make_strategy: MakeStrategy, batches: Batches):
    module = nn.Linear(3, 1)
    plain = copy.deepcopy(module)
    model = compiled(module, make_strategy(2))
    model.fit(batches, epochs=3, callbacks=[LearningRateScheduler(halved)], verbose=0)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** (update // len(batches)))

    train(plain, batches, slow_sgd, nn.functional.mse_loss, epochs=3, scheduler=schedule)
    assert_close(module, plain, 1e-6)
    assert model.learning_rate == 0.05 / 4


@pytest.mark.parametrize(
    ("arguments", "values", "rates"),
    [
        ({"patience": 1}, [3.0, 2.0, 2.5, 2.5], [1, 1, 0.1, 0.01]),
        ({"patience": 2, "factor": 0.5}, [3.0, 3.0, 3.0, 3.0, 3.0], [1, 1, 0.5, 0.5, 0.25]),
        ({"patience": 1, "cooldown": 2}, [3.0, 3.0, 3.0, 3.0, 3.0], [1, 0.1, 0.1, 0.01, 0.01]),
        ({"patience": 1, "min_lr": 0.05}, [3.0, 3.0, 3.0, 3.0], [1, 0.1, 0.05, 0.05]),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.6, 2.4], [1, 0.1, 0.1]),
        ({"patience": 1, "mode": "max"}, [1.0, 2.0, 1.0], [1, 1, 0.1]),
    ],
)
def test_the_rate_is_reduced_when_keras_would(
    model: Model, arguments: dict[str, Any], values: list[float], rates: list[float]
):
    callback = ReduceLROnPlateau(**arguments)
    callback.set_model(model)
    model.learning_rate = 1.0
    callback.on_train_begin({})
    seen = []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"val_loss": value})
        seen.append(model.learning_rate)
    assert seen == pytest.approx(rates)


def test_a_plateau_goes_on_after_a_resume(make_strategy: MakeStrategy, batches: Batches, tmp_path: Path):
    def train(epochs: int, folder: Path) -> Model:
        torch.manual_seed(0)
        model = compiled(nn.Linear(3, 1), make_strategy(2))
        plateau = ReduceLROnPlateau("loss", patience=2, min_delta=100.0, factor=0.5)
        backup = BackupAndRestore(folder, delete_checkpoint=False)
        model.fit(batches, epochs=epochs, callbacks=[plateau, backup], verbose=0)
        return model

    whole = train(4, tmp_path / "whole")
    train(2, tmp_path / "part")
    resumed = train(4, tmp_path / "part")

    assert resumed.learning_rate == whole.learning_rate == 0.025
    assert equal(weights(resumed), weights(whole))


def test_a_loss_that_is_nan_ends_fit_with_the_last_good_weights(
    model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]
):
    ended: list[str] = []
    bad = [*batches, (batches[0][0] * torch.nan, batches[0][1])]
    callbacks = [TerminateOnNaN(), LambdaCallback(on_train_end=lambda logs: ended.append("end"))]

    history = model.fit(bad, epochs=3, callbacks=callbacks, verbose=0)

    assert history.epoch == []
    assert ended == ["end"]
    assert model.stop_training
    assert "epoch 1, step 4" in capsys.readouterr().out
    assert all(map(torch.isfinite, (value for tensor in weights(model) for value in tensor.flatten())))
    with pytest.raises(NonFiniteLossError):
        model.fit(bad, verbose=0)


def test_the_rate_of_several_groups_is_not_overwritten(make_strategy: MakeStrategy):
    module = nn.Linear(3, 1)
    with make_strategy(2).scope():
        model = Model(module)
    with pytest.raises(UsageError, match="no optimizer"):
        model.learning_rate = 0.1
    groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.2}]
    model.compile(torch.optim.SGD(groups), "mse")
    with pytest.raises(UsageError, match="param_groups"):
        model.learning_rate = 0.1


@pytest.mark.parametrize("callback", [LearningRateScheduler(halved), ReduceLROnPlateau()])
def test_a_scheduler_beside_it_is_refused(make_strategy: MakeStrategy, batches: Batches, callback: Any):
    model = compiled(
        nn.Linear(3, 1),
        make_strategy(1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    with pytest.raises(CallbackError, match="scheduler"):
        model.fit(batches, callbacks=[callback], verbose=0)


@pytest.mark.parametrize("rate", [None, -1.0, float("nan")])
def test_a_schedule_that_returns_no_rate_is_refused(model: Model, batches: Batches, rate: Any):
    with pytest.raises(CallbackError, match=r"LearningRateScheduler.*at least 0"):
        model.fit(batches, callbacks=[LearningRateScheduler(lambda epoch, now: rate)], verbose=0)


@pytest.mark.parametrize("arguments", [{"factor": 1.0}, {"patience": -1}, {"cooldown": -1}, {"mode": "up"}])
def test_bad_arguments_are_refused(arguments: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ReduceLROnPlateau(**arguments)
