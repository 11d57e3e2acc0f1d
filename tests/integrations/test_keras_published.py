"""Programs after those of keras.io on replicas, beside the same programs by Keras alone on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy

keras = pytest.importorskip("keras")

from tests.integrations.programs import keras_models as KERAS  # noqa: E402

from lockstep.errors import ConfigError, UsageError  # noqa: E402
from lockstep.integrations.keras import distribute  # noqa: E402

EXACT = 1e-6


@pytest.mark.parametrize("name", list(KERAS.PUBLISHED))
def test_weights_history_and_predictions_are_those_of_keras_alone(name: str, make_strategy: MakeStrategy):
    program = KERAS.PUBLISHED[name]
    expected, history = KERAS.train(program, None)
    expected_outputs = expected.predict(program.fitted["x"], verbose=0)

    for replicas in (2, 3):
        model, found = KERAS.train(program, make_strategy(replicas))
        outputs = model.predict(program.fitted["x"], verbose=0)

        assert KERAS.largest_difference(found, history) < 20 * EXACT
        assert KERAS.largest_difference(model.get_weights(), expected.get_weights()) < EXACT
        assert KERAS.largest_difference([outputs], [expected_outputs]) < 20 * EXACT


class Alone(keras.Model):
    """A model of one layer, whose step is that of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def loss_of(self, data: Any) -> Any:
        return self.compute_loss(y=data[1], y_pred=self(data[0]))


class BackwardOfTorch(Alone):
    def train_step(self, data: Any) -> dict[str, Any]:
        torch.autograd.backward([self.loss_of(data)])
        return {}


TRACKER = keras.metrics.Mean(name="of_all_models")


class UnknownMetric(Alone):
    def train_step(self, data: Any) -> dict[str, Any]:
        TRACKER.update_state(self.loss_of(data))
        return {"loss": TRACKER.result()}


class Summed(Alone):
    def train_step(self, data: Any) -> dict[str, Any]:
        keras.ops.sum(self(data[0]) ** 2).backward()
        self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
        return {}


class Counting(Alone):
    steps = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        self.steps += 1
        return {}


class HiddenSuper(Alone):
    def train_step(self, data: Any) -> dict[str, Any]:
        step: Callable[..., Any] = getattr(super(), "train" + "_step")
        return step(data)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (BackwardOfTorch, "loss.backward"),
        (UnknownMetric, "of_all_models"),
        (Summed, "Summed.train_step"),
        (Counting, "'steps'"),
        (HiddenSuper, "super"),
    ],
)
def test_steps_that_would_have_other_numbers_are_refused(kind: Any, named: str, make_strategy: MakeStrategy):
    model = distribute(kind(), make_strategy(2))
    model.compile("sgd", KERAS.entropy())
    with pytest.raises((ConfigError, UsageError), match=named) as refused:
        model.fit(KERAS.X, KERAS.LABELS, verbose=0)
    assert "\n" not in str(refused.value)


class RareSum(Alone):
    """Adds a sum of squares, which is no mean over rows, for rows that are marked: the third batch has the first."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        marked = keras.ops.cast(x[:, 0] > 100, "float32")
        loss = self.compute_loss(y=y, y_pred=self(x)) + keras.ops.sum(marked[:, None] * self(x / 100) ** 2)
        loss.backward()
        self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}


def test_a_step_that_is_no_mean_over_rows_from_a_later_batch_on_is_refused_then(make_strategy: MakeStrategy):
    model = distribute(RareSum(), make_strategy(2))
    model.compile(keras.optimizers.SGD(0.0), KERAS.entropy())
    plain, marked = KERAS.X[:4], KERAS.X[:4].copy()
    marked[:, 0] = 200
    model.fit(plain, KERAS.LABELS[:4], epochs=3, verbose=0)
    with pytest.raises(ConfigError, match=r"RareSum\.train_step gets other gradients"):
        model.fit(marked, KERAS.LABELS[:4], epochs=2, verbose=0)


class Noisy(Alone):
    """Draws numbers in all ways, which are others in each replica; shuffles rows, which stay in their shard."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        x = x + 0.1 * keras.random.normal(x.shape) + 0.1 * torch.randn(x.shape)
        x = 0.5 * (x + x[torch.randperm(len(x))])
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=keras.ops.tanh(torch.nn.functional.dropout(self(x), 0.1)))
        loss.backward()
        self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
        return {"own": loss}


def test_a_step_that_draws_numbers_is_not_refused(make_strategy: MakeStrategy):
    model = distribute(Noisy(), make_strategy(3))
    model.compile("sgd", KERAS.entropy())
    history = model.fit(KERAS.X, KERAS.LABELS, verbose=0).history
    assert history["own"][0] > 0.0


def test_a_rerun_with_one_strategy_has_the_same_bits(make_strategy: MakeStrategy):
    strategy, weights = make_strategy(2), []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        model = distribute(Noisy(), strategy)
        model.compile("sgd", KERAS.entropy())
        model.fit(KERAS.X, KERAS.LABELS, verbose=0)
        weights.append(model.get_weights())
    assert KERAS.largest_difference(*weights) == 0.0


class AlwaysNoisy(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)


def test_predictions_that_are_drawn_differ_from_call_to_call(make_strategy: MakeStrategy):
    model = distribute(keras.Sequential([keras.Input((8,)), AlwaysNoisy()]), make_strategy(2))
    drawn = [model.predict(KERAS.X[:8], verbose=0) for _ in range(2)]
    assert (drawn[0] != drawn[1]).all()


class Total(keras.layers.Layer):
    """Adds up its inputs without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_weight(shape=(8,), initializer="zeros", trainable=False, name="of_rows")

    def call(self, x: Any) -> Any:
        self.total.assign_add(keras.ops.sum(x, axis=0))
        return x


def quantized() -> Any:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.quantize("float8")
    return model


def drawing_from(generator: Any) -> Any:
    noise = keras.layers.Lambda(lambda x: x + keras.random.normal(keras.ops.shape(x), seed=generator))
    return keras.Sequential([keras.Input((8,)), noise, keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("model", "error", "named"),
    [
        (lambda: keras.Sequential([keras.Input((8,)), Total(), keras.layers.Dense(3)]), ConfigError, "of_rows"),
        (quantized, ConfigError, "float8"),
        (lambda: drawing_from(keras.random.SeedGenerator(1)), UsageError, "seed_generator"),
    ],
)
def test_variables_that_replicas_cannot_merge_are_refused(
    model: Callable[[], Any], error: type[Exception], named: str, make_strategy: MakeStrategy
):
    ours = distribute(model(), make_strategy(2))
    ours.compile("sgd", KERAS.entropy())
    with pytest.raises(error, match=named):
        ours.fit(KERAS.X, KERAS.LABELS, verbose=0)
