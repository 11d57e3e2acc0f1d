"""EMA and SWA beside torch's AveragedModel in a hand-written loop on one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.oracle import assert_close, train
from tests.stand_in import stand_in_gpus
from tests.train.conftest import MakeStrategy
from tests.train.conftest import compiled as compiled_on
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import lockstep as ls
from lockstep.errors import CallbackError, ConfigError
from lockstep.train.callbacks import Callback, LambdaCallback
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]

EPOCHS, DECAY = 3, 0.7


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def compiled(strategy: Any, **settings: Any) -> Model:
    return compiled_on(network(), strategy, adam, **settings)


def by_hand(batches: Batches, averaged: AveragedModel, *, accumulate: int = 1, swa_from: int | None = None) -> Any:
    """Trains on one device. Returns the weights and the average, and the losses of the average after each epoch."""
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    losses, updates, an_epoch = [], 0, math.ceil(len(batches) / accumulate)

    def average(module: nn.Module) -> None:
        nonlocal updates
        epoch, ended = updates // an_epoch, (updates + 1) % an_epoch == 0
        updates += 1
        if swa_from is None or (ended and epoch >= swa_from):
            averaged.update_parameters(module)
        if ended:
            evaluated = averaged if int(averaged.n_averaged) else module
            losses.append(nn.functional.mse_loss(evaluated(x), y).item())

    loss = nn.MSELoss()
    module = train(network(), batches, adam, loss, epochs=EPOCHS, accumulate=accumulate, after_update=average).module
    return module, averaged.module, losses


def values(module: Any) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def are_equal(left: Any, right: Any) -> bool:
    return all(map(torch.equal, values(left), values(right)))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_the_model_is_validated_and_left_with_the_average_of_one_device(
    make_strategy: MakeStrategy, batches: Batches, kind: str, accumulate: int
):
    is_ema = kind == "ema"
    average = get_ema_multi_avg_fn(DECAY) if is_ema else get_swa_multi_avg_fn()
    averaged = AveragedModel(network(), multi_avg_fn=average)
    trained, expected, losses = by_hand(batches, averaged, accumulate=accumulate, swa_from=None if is_ema else 1)
    callback = ls.EMA(DECAY) if is_ema else ls.SWA(start_from_epoch=1)
    seen: list[dict[str, Tensor]] = []
    end = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(copy.deepcopy(model.state_dict())))
    model = compiled(make_strategy(3), accumulate=accumulate)

    history = model.fit(batches, validation_data=batches, epochs=EPOCHS, callbacks=[end, callback], verbose=0)

    assert_close(dict(model.state_dict()), expected, 2e-6)
    assert history.history["val_loss"] == pytest.approx(losses, abs=1e-6)
    alone = compiled(model.strategy, accumulate=accumulate)
    assert alone.fit(batches, epochs=EPOCHS, verbose=0).history["loss"] == history.history["loss"]  # bit for bit
    if accumulate == 1:
        assert_close(dict(alone.state_dict()), trained, 2e-6)
        assert all(map(torch.equal, alone.state_dict().values(), seen[-1].values()))


class Failure(Exception):
    pass


def failing_at(hook: str, count: int) -> LambdaCallback:
    calls = iter(range(count))

    def fail(*_: Any) -> None:
        if next(calls, None) is None:
            raise Failure

    return LambdaCallback(**{hook: fail})


@pytest.mark.parametrize("freq", ["epoch", 2])
@pytest.mark.parametrize("make", [lambda: ls.EMA(DECAY, update_every=2), lambda: ls.SWA(0)])
def test_an_interrupted_training_goes_on_with_the_same_bits(
    make_strategy: MakeStrategy, batches: Batches, tmp_path: Path, make: Callable[[], Callback], freq: Any
):
    strategy = make_strategy(3)

    def fit(model: Model, *callbacks: Callback) -> Any:
        return model.fit(batches, validation_data=batches, epochs=EPOCHS, callbacks=[*callbacks, make()], verbose=0)

    whole = compiled(strategy)
    expected = fit(whole)
    for place in ("on_train_batch_begin", "on_test_batch_begin"):
        folder = tmp_path / place
        with pytest.raises(CallbackError, match="Failure"):
            fit(compiled(strategy), ls.BackupAndRestore(folder, save_freq=freq), failing_at(place, 5))
        resumed = compiled(strategy)
        history = fit(resumed, ls.BackupAndRestore(folder, save_freq=freq))
        assert are_equal(resumed, whole)
        assert history.history == expected.history


def test_what_is_saved_has_the_average_and_a_whole_checkpoint_both(
    make_strategy: MakeStrategy, batches: Batches, tmp_path: Path
):
    model = compiled(make_strategy(2))
    trained: list[list[Tensor]] = []
    inside = LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(values(model)))
    saving = [
        ls.ModelCheckpoint(tmp_path / "{epoch}.safetensors"),
        ls.ModelCheckpoint(tmp_path / "batch-{epoch}-{batch}.safetensors", save_freq=1),
        ls.ModelCheckpoint(tmp_path / "whole", save_weights_only=False),
        ls.EarlyStopping("loss", patience=9, restore_best_weights=True),
    ]
    model.fit(batches, epochs=2, callbacks=[inside, *saving, ls.EMA(DECAY)], verbose=0)

    for epoch in (1, 2):
        saved = load_file(tmp_path / f"{epoch}.safetensors")
        last = load_file(tmp_path / f"batch-{epoch}-3.safetensors")
        assert all(map(torch.equal, saved.values(), last.values()))
        assert not all(map(torch.equal, saved.values(), trained[3 * epoch - 1]))
    assert all(
        torch.equal(value, load_file(tmp_path / "2.safetensors")[name]) for name, value in model.state_dict().items()
    )
    model.load_checkpoint(tmp_path / "whole")
    assert all(map(torch.equal, values(model), trained[-1]))


def test_after_an_error_the_model_has_the_trained_weights(make_strategy: MakeStrategy, batches: Batches):
    model, alone = compiled(make_strategy(2)), compiled(make_strategy(2))
    alone.fit(batches, epochs=1, verbose=0)
    with pytest.raises(CallbackError, match="Failure"):
        model.fit(
            batches, validation_data=batches, callbacks=[ls.EMA(DECAY), failing_at("on_test_batch_begin", 1)], verbose=0
        )
    assert are_equal(model, alone)


def test_gpus_have_a_copy_of_the_average_each(batches: Batches):
    with stand_in_gpus() as (devices, _), closing(ls.MirroredStrategy(devices)) as strategy:
        model, other = compiled(strategy), compiled(strategy)
        history = model.fit(batches, validation_data=batches, epochs=2, callbacks=[ls.EMA(DECAY)], verbose=0)
        assert history.history["loss"] == other.fit(batches, epochs=2, verbose=0).history["loss"]
        first, second = strategy.mirrored_modules[0].copies[:2]
        assert are_equal(first, second)
        assert next(first.parameters()).data_ptr() != next(second.parameters()).data_ptr()
        assert not are_equal(model, other)


def test_batch_norm_is_warned_of_and_update_bn_mends_it(make_strategy: MakeStrategy, batches: Batches):
    torch.manual_seed(0)
    with make_strategy(2).scope():
        model = Model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), sync_batchnorm=True)
        model.compile("adam", "mse")
    with pytest.warns(UserWarning, match=r"EMA averages weights.*'1'.*update_bn\(inputs, model\.module\)"):
        model.fit(batches, epochs=2, callbacks=[ls.EMA(DECAY)], verbose=0)
    plain = copy.deepcopy(model.module)
    update_bn(batches, model.module)
    update_bn(batches, plain)
    assert_close(dict(model.state_dict()), plain, 2e-6)
    x, y = batches[0]
    expected = nn.functional.mse_loss(plain.eval()(x), y).item()
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.EMA(1.5), r"EMA\(decay\)=1.5"),
        (lambda: ls.EMA(update_every=0), r"EMA\(update_every\)=0"),
        (lambda: ls.SWA(-1), r"SWA\(start_from_epoch\)=-1"),
    ],
)
def test_bad_values_are_refused(make: Callable[[], Callback], message: str):
    with pytest.raises(ConfigError, match=message):
        make()
