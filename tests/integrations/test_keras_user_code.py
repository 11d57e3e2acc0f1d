"""On replicas, code of a Keras user sees what Keras shows it: in ``compute_loss``, layers, steps and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import MakeStrategy

keras = pytest.importorskip("keras")

from keras.src.backend.common.symbolic_scope import in_symbolic_scope  # noqa: E402

import lockstep as ls  # noqa: E402
from lockstep.errors import ConfigError, UsageError  # noqa: E402
from lockstep.integrations.keras import distribute  # noqa: E402

X = np.random.default_rng(0).normal(size=(37, 4)).astype("float32")
Y = (X @ np.ones((4, 2)) + 1.0).astype("float32")
EXACT = 1e-6


def dense(*before: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), *before, keras.layers.Dense(2)])


def on_both(model: Callable[[], Any], strategy: ls.Strategy, use: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What ``use`` returns for the model of Keras alone, and for the one on replicas."""
    results = []
    for place in (None, strategy):
        keras.utils.set_random_seed(1)
        results.append(use(model() if place is None else distribute(model(), place)))
    return results[0], results[1]


def fitted(model: Any, **settings: Any) -> dict[str, list[float]]:
    settings = {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "metrics": ["mae"], **settings}
    model.compile(**settings)
    history: dict[str, list[float]] = model.fit(
        X, Y, batch_size=16, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0
    ).history
    return history


def assert_equal_history(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=20 * EXACT, err_msg=name)


class TrainingLoss(keras.Model):
    """A loss that is twice as large in training, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(2)
        self.told: list[Any] = []

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        if not in_symbolic_scope():  # in which Keras builds the model
            self.told.append(training)
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 2.0 * loss if training else loss


class NoisyLoss(TrainingLoss):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        x = keras.random.dropout(x, 0.5) + keras.random.normal(keras.ops.shape(x)) if training else x
        return super().compute_loss(x, y, self.out(x), sample_weight, training)


def test_compute_loss_is_told_that_the_model_trains_from_the_first_call(make_strategy: MakeStrategy):
    def use(model: Any) -> Any:
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        trained, model.told = set(model.told), []
        model.compile("sgd", "mse")
        model.evaluate(X, Y, verbose=0)
        return trained, set(model.told)

    expected, told = on_both(TrainingLoss, make_strategy(2), use)

    assert told == expected == ({True}, {False})


def test_a_loss_that_knows_training_is_that_of_keras_alone(make_strategy: MakeStrategy):
    expected, history = on_both(TrainingLoss, make_strategy(3), fitted)
    assert_equal_history(history, expected)


class Sampling(keras.layers.Layer):
    """Draws in evaluation too, as the sampling layer of a variational autoencoder."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator)


class DefaultSampling(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x))


@pytest.mark.parametrize(
    "model", [lambda: dense(Sampling(1)), lambda: dense(Sampling(None)), lambda: dense(DefaultSampling()), NoisyLoss]
)
def test_what_is_drawn_at_random_is_no_reason_to_refuse_a_loss(model: Callable[[], Any], make_strategy: MakeStrategy):
    rerun = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        rerun.append(fitted(distribute(model(), make_strategy(2))))
    assert rerun[0] == rerun[1]
    assert rerun[0]["loss"][1] < rerun[0]["loss"][0]


def shift(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred[:, 0]))) + 0.0 * keras.ops.mean(y_true)


def test_a_loss_over_rows_is_refused_beside_a_layer_that_draws(make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match="no mean over"):
        fitted(distribute(dense(Sampling(1)), make_strategy(2)), loss=shift)


class DoubledInTraining(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return 2.0 * x if training else x


def frozen() -> Any:
    model = dense(DoubledInTraining())
    model.trainable = False
    return model


@pytest.mark.parametrize("model", [frozen, lambda: keras.Sequential([keras.Input((4,)), DoubledInTraining()])])
@pytest.mark.filterwarnings("ignore:.*trainable weights")
def test_a_model_without_trainable_weights_is_called_in_training_mode(
    model: Callable[[], Any], make_strategy: MakeStrategy
):
    def use(made: Any) -> Any:
        made.compile("sgd", "mse")
        history = made.fit(X, X[:, : made.output_shape[-1]], batch_size=16, shuffle=False, verbose=0).history
        return history, int(made.optimizer.iterations)

    (expected, updates), (history, same_updates) = on_both(model, make_strategy(2), use)

    assert_equal_history(history, expected)
    assert updates == same_updates == 0


def test_run_eagerly_is_what_keras_on_torch_always_does(make_strategy: MakeStrategy):
    expected, history = on_both(dense, make_strategy(2), lambda model: fitted(model, run_eagerly=True))
    assert_equal_history(history, expected)


def test_a_model_is_compiled_from_the_configuration_of_another(make_strategy: MakeStrategy):
    def use(model: Any) -> Any:
        other = dense()
        other.compile(keras.optimizers.SGD(0.05), "mae", metrics=["mse"])
        model.compile("adam", "mse")
        model.fit(X, Y, verbose=0)
        model.compile_from_config(other.get_compile_config())
        return model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history

    expected, history = on_both(dense, make_strategy(2), use)

    assert "mse" in history
    np.testing.assert_allclose(history["mse"], expected["mse"], rtol=1e-4)


class Unbuilt(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.out(x)


class UnbuiltWithStep(Unbuilt):
    def predict_step(self, data: Any) -> Any:
        return self(data[0] if isinstance(data, tuple) else data) + 1.0


@pytest.mark.parametrize("model", [Unbuilt, UnbuiltWithStep])
@pytest.mark.parametrize("method", ["predict", "predict_on_batch"])
def test_predict_makes_the_weights_that_keras_makes(model: Callable[[], Any], method: str, make_strategy: MakeStrategy):
    def use(made: Any) -> Any:
        return getattr(made, method)(X), made.get_weights()

    (expected, weights), (outputs, same_weights) = on_both(model, make_strategy(3), use)

    np.testing.assert_allclose(outputs, expected, atol=EXACT)
    assert len(same_weights) == len(weights) == 2
    for weight, same in zip(weights, same_weights, strict=True):
        np.testing.assert_array_equal(same, weight)


class StepByItself(Unbuilt):
    """Counts its batches; its steps are none of Keras's."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = self.add_weight(initializer="zeros", trainable=False, aggregation="only_first_replica")

    def train_step(self, data: Any) -> Any:
        self.batches.assign_add(1.0)
        x, y = data
        self.zero_grad()
        loss = keras.ops.mean(keras.ops.square(self(x) - y))
        loss.backward()
        with torch.no_grad():
            weights = self.trainable_weights
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}

    def predict_step(self, data: Any) -> Any:
        return self(data[0] if isinstance(data, tuple) else data)


def test_a_step_function_takes_every_batch_that_keras_gives_it(make_strategy: MakeStrategy):
    # Keras 3.16 gives several, as many as steps_per_execution; 3.15 gives one.
    model = distribute(StepByItself(), make_strategy(2))
    model.compile("sgd")
    model(X[:1])
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    model.make_predict_function()
    batches = [
        (torch.from_numpy(X[:10]), torch.from_numpy(Y[:10])),
        (torch.from_numpy(X[10:]), torch.from_numpy(Y[10:])),
    ]

    model.train_function(batches)
    outputs = model.predict_function([(x,) for x, _ in batches])

    assert float(model.batches) == 2.0
    np.testing.assert_allclose(outputs.numpy(), model(X).detach().numpy(), atol=EXACT)


def test_a_model_inside_a_distributed_model_of_another_strategy_is_refused(make_strategy: MakeStrategy):
    inner = distribute(dense(), make_strategy(2))
    model = distribute(keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2)]), make_strategy(3))
    with pytest.raises(UsageError, match="another strategy"):
        fitted(model)


@pytest.mark.parametrize("first", [2, 4])
def test_a_loss_that_compares_rows_from_a_later_batch_on_is_refused_then(make_strategy: MakeStrategy, first: int):
    """As where the events that it is about are rare."""
    events = np.zeros((64, 1), "float32")
    events[8 * (first - 1) :] = 1.0
    inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    batches: list[int] = []

    def partial_likelihood(y: Any, risk: Any) -> Any:
        return (torch.logsumexp(risk, 0) - risk) * y

    keras.utils.set_random_seed(1)
    model = distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), make_strategy(2))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss=partial_likelihood)
    count = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: batches.append(batch + 1))
    with pytest.raises(ConfigError, match="the loss of a batch"):
        model.fit(inputs, events, batch_size=8, shuffle=False, verbose=0, callbacks=[count])
    assert batches[-1] == first
