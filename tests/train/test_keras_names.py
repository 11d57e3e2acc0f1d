"""What programs for Keras write: names of losses and metrics, arguments, and methods of a model."""

from __future__ import annotations

import os
import re
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # before any test imports Keras

from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from tests.oracle import assert_close, sgd, train
from tests.train.conftest import MakeStrategy, compiled
from torch import Tensor, nn

from lockstep.errors import ConfigError, NonFiniteLossError
from lockstep.train.callbacks import (
    BackupAndRestore,
    Callback,
    EarlyStopping,
    LambdaCallback,
    MaxTime,
    ModelCheckpoint,
    TensorBoard,
)
from lockstep.train.logs import History
from lockstep.train.model import Model

ROWS = 7
Batches = list[tuple[Tensor, Tensor]]


def network(*last: nn.Module, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, outputs), *last)


def numbers(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3))


CLASSES = torch.tensor([0, 2, 1, 1, 0, 2, 2])
ONE_HOT = nn.functional.one_hot(CLASSES, 3)
LOSSES: dict[str, tuple[tuple[nn.Module, ...], Tensor]] = {
    "sparse_categorical_crossentropy": ((nn.Softmax(-1),), CLASSES),
    "SparseCategoricalCrossentropy": ((nn.Softmax(-1),), CLASSES[:, None]),
    "categorical_crossentropy": ((nn.Softmax(-1),), ONE_HOT),
    "binary_crossentropy": ((nn.Sigmoid(),), ONE_HOT),
    "kl_divergence": ((nn.Softmax(-1),), numbers(ROWS, 3)),
    "mean_squared_error": ((), numbers(ROWS, 3)),
    "MAE": ((), numbers(ROWS, 3)),
    "MeanAbsolutePercentageError": ((), numbers(ROWS, 3) + 0.1),
    "msle": ((), numbers(ROWS, 3)),
    "log_cosh": ((), numbers(ROWS, 3)),
    "huber": ((), 3 * numbers(ROWS, 3)),
    "poisson": ((nn.Softplus(),), numbers(ROWS, 3)),
}


class MeanOf(keras.losses.Loss):  # type: ignore[misc]  # untyped
    """What compile of Keras makes of a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.call = function


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_name_trains_as_keras_own_loss_on_one_device(make_strategy: MakeStrategy, name: str, weighted: bool):
    last, y = LOSSES[name]
    x, plain = numbers(ROWS, 4), network(*last)
    weight = torch.linspace(0.5, 2, ROWS) if weighted else None
    model = compiled(network(*last), make_strategy(3), sgd, name)

    history = model.fit(x, y, batch_size=4, sample_weight=weight, shuffle=False, verbose="auto")

    keras_loss = keras.losses.get(name)
    loss = keras_loss if isinstance(keras_loss, keras.losses.Loss) else MeanOf(keras_loss)
    rows = [(x[part], (y[part], None if weight is None else weight[part])) for part in (slice(0, 4), slice(4, 7))]
    alone = train(plain, rows, sgd, lambda outputs, target: loss(target[0], outputs, sample_weight=target[1]))
    assert history.history["loss"] == pytest.approx(alone.epoch_losses(1), rel=1e-5)
    assert_close(dict(model.state_dict()), plain, 1e-5)


@pytest.mark.parametrize(
    ("name", "outputs", "y", "advice"),
    [
        ("sparse_categorical_crossentropy", 3, CLASSES, "'cross_entropy' and leave the softmax out"),
        ("categorical_crossentropy", 3, ONE_HOT, "'cross_entropy' and leave the softmax out"),
        ("binary_crossentropy", 1, CLASSES > 0, "'binary_cross_entropy_with_logits' and leave the sigmoid out"),
    ],
)
def test_logits_under_a_name_that_takes_probabilities_are_refused(
    make_strategy: MakeStrategy, name: str, outputs: int, y: Tensor, advice: str
):
    model = compiled(network(outputs=outputs), make_strategy(2), "sgd", name)
    before = model.get_weights()
    with pytest.raises(ConfigError, match=f"takes probabilities, as in Keras.*{advice}"):
        model.fit(numbers(ROWS, 4), y, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))


class LateLogits(nn.Module):
    """Gives probabilities in the first steps, and logits when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gives_logits = network(), False

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs if self.gives_logits else outputs.softmax(-1)


def test_logits_that_come_late_end_in_an_error_and_change_no_weight(make_strategy: MakeStrategy):
    module = LateLogits()
    model = compiled(module, make_strategy(2), "sgd", "sparse_categorical_crossentropy")

    def switch(batch: int, logs: Any) -> None:
        if batch == 9:  # steps 9 to 15 are not compared on the host
            module.gives_logits = True
            seen.extend(model.get_weights())

    seen: list[Any] = []
    batches = [(numbers(ROWS, 4), CLASSES)] * 12
    with pytest.raises(NonFiniteLossError):
        model.fit(batches, callbacks=[LambdaCallback(on_train_batch_begin=switch)], verbose=0)
    assert all(map(np.array_equal, seen, model.get_weights()))


def test_probabilities_under_the_name_that_takes_logits_are_warned_of(make_strategy: MakeStrategy):
    model = compiled(network(nn.Softmax(-1)), make_strategy(1), "sgd", "cross_entropy")
    with pytest.warns(UserWarning, match=r"takes logits.*leave the softmax out"):
        model.evaluate(numbers(ROWS, 4), CLASSES, verbose=0)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"loss": "hinge"}, r"targets \* outputs"),
        ({"loss": "CategoricalHinge"}, "MultiMarginLoss"),
        ({"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}, "CrossEntropyLoss"),
        ({"loss": keras.losses.mean_squared_error}, "other order"),
        ({"loss": "mse", "loss_weights": [1.0]}, "weigh the losses in a function"),
        ({"loss": "mse", "jit_compile": True, "run_eagerly": True}, "leave one of them out"),
        ({"loss": "mse", "jit_compile": "yes"}, "choose True, False or 'auto'"),
    ],
)
def test_what_has_no_equal_says_what_to_write(settings: dict[str, Any], advice: str):
    with pytest.raises(ConfigError, match=advice):
        Model(nn.Linear(4, 3)).compile("SGD", **settings)


def test_names_of_metrics_are_keras_and_stay_the_names_of_the_logs(make_strategy: MakeStrategy):
    x = numbers(ROWS, 4)
    names = ["acc", "sparse_categorical_accuracy", "accuracy"]
    with make_strategy(3).scope():
        model = Model(network(nn.Softmax(-1)))
        model.compile("Adam", "sparse_categorical_crossentropy", metrics=names, jit_compile="auto", run_eagerly=True)
    expected = (network()(x).argmax(1) == CLASSES).float().mean().item()

    logs = model.evaluate(x, CLASSES, verbose=0)
    assert [logs[name] for name in names] == pytest.approx([expected] * 3)
    logs = model.evaluate(x, CLASSES, batch_size=4, steps=1, verbose=0)
    assert logs["acc"] == pytest.approx((network()(x[:4]).argmax(1) == CLASSES[:4]).float().mean().item())
    assert model.predict(x, batch_size=2, steps=2).shape == (4, 3)
    with pytest.raises(ConfigError, match="evaluate returns a dict"):
        model.evaluate(x, CLASSES, return_dict=True)  # type: ignore[call-arg]


def test_weights_are_arrays_in_the_order_of_the_state_dict(make_strategy: MakeStrategy):
    with make_strategy(2).scope():
        model, other = Model(network(nn.BatchNorm1d(3))), Model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    weights = model.get_weights()
    other.set_weights(weights)

    assert [type(array) for array in weights] == [np.ndarray] * len(model.state_dict())
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    with pytest.raises(ConfigError, match="got 1 arrays for the 7 tensors"):
        model.set_weights(weights[:1])
    with pytest.raises(ConfigError, match=r"shape \(3,\) for '0.weight' of shape \(3, 4\)"):
        model.set_weights([weights[1], *weights[1:]])


def test_methods_that_have_no_equal_say_what_stands_in():
    model = Model(nn.Linear(1, 1))
    with pytest.raises(AttributeError, match=r"model\.save_weights\('model\.safetensors'\)"):
        model.save("model.keras")  # type: ignore[attr-defined]
    assert not hasattr(model, "save")
    assert not hasattr(model, "unheard_of")


def test_a_fast_run_trains_a_few_batches_and_writes_no_files(
    model: Model, batches: Batches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    steps: dict[str, int] = {"train": 0, "test": 0}
    count = LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.update(train=batch + 1),
        on_test_batch_end=lambda batch, logs: steps.update(test=batch + 1),
    )
    writing = [ModelCheckpoint(tmp_path / "w"), TensorBoard(tmp_path)]
    history = model.fit(
        batches,
        validation_data=batches,
        validation_freq=5,
        epochs=8,
        callbacks=[count, EarlyStopping(), *writing],
        fast_dev_run=2,
    )

    assert steps == {"train": 2, "test": 2}
    assert history.epoch == [0]
    assert "val_loss" in history.history
    assert list(tmp_path.iterdir()) == []
    assert "2 training and validation batches, without ModelCheckpoint, TensorBoard" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="fast_dev_run=0"):
        model.fit(batches, fast_dev_run=0)


def test_a_time_limit_ends_the_training_after_a_batch_and_counts_over_interruptions(
    model: Model, batches: Batches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, same, longer = MaxTime(3600), MaxTime(3600), MaxTime(7200)
    use_up = LambdaCallback(on_train_batch_begin=lambda batch, logs: vars(first).update(_began=first._began - 1300))

    def fit(*callbacks: Callback) -> History:
        backup = BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        return model.fit(batches[:2], epochs=3, callbacks=[*callbacks, backup], validation_data=batches)

    history = fit(use_up, first)
    ends = r"MaxTime: training ends after (\d+) s of 3600 s, in epoch 2, step 3 of all trainings\n"
    assert [timing.steps for timing in history.timing] == [2, 1]
    assert len(history.history["val_loss"]) == 2
    (seconds,) = map(int, re.findall(ends, capsys.readouterr().out))
    assert 3900 <= seconds < 4500  # three steps of 1300 s, and what they took

    fit(same)
    assert model.training_state.position.step == 3
    assert len(re.findall(ends, capsys.readouterr().out)) == 1
    fit(longer)
    assert model.training_state.position.step == 5
    assert 3900 <= longer.elapsed_s < 7200


def test_the_line_of_a_time_limit_has_the_epoch_of_its_fit_and_the_step_of_all_fits(
    model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]
):
    def fit() -> str:
        limit = MaxTime(3600)
        use_up = LambdaCallback(on_train_batch_begin=lambda batch, logs: vars(limit).update(_began=limit._began - 1300))
        model.fit(batches[:2], epochs=3, callbacks=[use_up, limit])
        return capsys.readouterr().out

    assert "in epoch 2, step 3 of all trainings\n" in fit()
    assert "in epoch 2, step 6 of all trainings\n" in fit()
