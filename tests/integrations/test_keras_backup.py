"""BackupAndRestore of Keras models: a resumed fit has the bits of one that was not interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import MakeStrategy

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

import torch  # noqa: E402

import lockstep as ls  # noqa: E402
from lockstep.errors import CheckpointError, ConfigError  # noqa: E402
from lockstep.integrations.keras import BackupAndRestore, distribute  # noqa: E402

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(19, 4)).astype("float32"), RANDOM.normal(size=(19, 1)).astype("float32")
BATCHES = 5  # of 4 rows, the last of 3


class Interruption(Exception):
    pass


class Steps(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Notes epoch and batch of each step, and ends the training after some."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.epoch, self.limit = 0, limit
        self.places: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.places.append((self.epoch, batch))
        if len(self.places) == self.limit:
            raise Interruption


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Draws without a seed: from the replica's generators."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + 0.1 * (keras.random.normal(keras.ops.shape(x)) + torch.randn(x.shape)) if training else x


def model(strategy: Any, layers: Callable[[], list[Any]] = list, seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    stack = keras.Sequential([keras.Input((4,)), *layers(), keras.layers.Dense(1)])
    stack = stack if strategy is None else distribute(stack, strategy)
    stack.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return stack


def random_layers() -> list[Any]:
    return [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.4), Noise()]


def fit(model: Any, *callbacks: Any, epochs: int = 3, **more: Any) -> dict[str, list[float]]:
    data = more.pop("data", (X, Y))
    batch_size = 4 if len(data) == 2 else None
    history: dict[str, list[float]] = model.fit(
        *data, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=list(callbacks), **more
    ).history
    return history


@pytest.mark.slow
@pytest.mark.parametrize(("save_freq", "limit", "first"), [(2, 9, (1, 3)), (5, 12, (2, 0)), ("epoch", 12, (2, 0))])
def test_a_resumed_fit_has_the_bits_of_one_that_was_not_interrupted(
    make_strategy: MakeStrategy, tmp_path: Path, save_freq: Any, limit: int, first: tuple[int, int]
):
    whole = model(make_strategy(2), random_layers)
    expected = fit(whole, validation_data=(X, Y))

    with pytest.raises(Interruption):
        fit(
            model(make_strategy(2), random_layers),
            BackupAndRestore(tmp_path / "backup", save_freq),
            Steps(limit),
            validation_data=(X, Y),
        )
    resumed, steps = model(make_strategy(2), random_layers, seed=4), Steps()
    history = fit(resumed, BackupAndRestore(tmp_path / "backup", save_freq), steps, validation_data=(X, Y))

    assert steps.places[0] == first
    assert steps.places[-1] == (2, BATCHES - 1)
    assert {len(values) for values in history.values()} == {3 - first[0]}  # one number for each epoch
    for name, values in history.items():
        assert values == expected[name][-len(values) :], name
    for value, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
    assert not (tmp_path / "backup").exists()
    assert len(fit(resumed, epochs=2)["loss"]) == 2


@pytest.mark.slow
def test_on_another_number_of_replicas_it_continues_with_the_numbers_of_one_device(
    make_strategy: MakeStrategy, tmp_path: Path
):
    """Keras's own model, never interrupted, on one device: the same rows in the same order."""
    alone = model(None)
    expected = fit(alone)
    with pytest.raises(Interruption):
        fit(model(make_strategy(4)), BackupAndRestore(tmp_path, 2), Steps(8))
    resumed = model(make_strategy(3), seed=4)

    history = fit(resumed, BackupAndRestore(tmp_path, 2, double_checkpoint=True, delete_checkpoint=False))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000012", "step-00000014"]
    assert history["loss"] == pytest.approx(expected["loss"][1:], rel=1e-5)
    for value, other in zip(resumed.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-6)


def test_rows_of_a_loader_that_draws_are_those_that_were_left(make_strategy: MakeStrategy, tmp_path: Path):
    """Also where a dataset draws random numbers for each row, and a callback after each batch."""
    drawing = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: torch.rand(3))

    class Drawing(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(X[index]) + torch.rand(4), torch.from_numpy(Y[index])

    def loader() -> Any:
        return (torch.utils.data.DataLoader(Drawing(), batch_size=4, shuffle=True),)

    whole = model(make_strategy(2))
    fit(whole, drawing, data=loader())
    with pytest.raises(Interruption):
        fit(model(make_strategy(2)), drawing, BackupAndRestore(tmp_path, 3), Steps(9), data=loader())
    resumed = model(make_strategy(2), seed=4)
    fit(resumed, drawing, BackupAndRestore(tmp_path, 3), data=loader())

    for value, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)


def test_what_cannot_be_continued_is_refused(make_strategy: MakeStrategy, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"save_freq=0\); give 'epoch' or a number of batches"):
        BackupAndRestore(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"fit\(steps_per_epoch=2\)"):
        fit(model(make_strategy(2)), BackupAndRestore(tmp_path), steps_per_epoch=2)
    with pytest.raises(ConfigError, match=r"such as lockstep\.integrations\.keras\.BackupAndRestore"):
        fit(model(make_strategy(2)), ls.BackupAndRestore(tmp_path))
    with pytest.raises(ConfigError, match="give the model to distribute"):
        fit(model(None), BackupAndRestore(tmp_path))
    with pytest.raises(Interruption):
        fit(model(make_strategy(2)), BackupAndRestore(tmp_path, 2), Steps(3))
    with pytest.raises(CheckpointError, match="build and compile the model as it was"):
        fit(model(make_strategy(2), lambda: [keras.layers.Dense(3)]), BackupAndRestore(tmp_path, 2))
