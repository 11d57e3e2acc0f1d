"""``jit_compile=True`` for Keras models on replicas: the numbers of the uncompiled model, or one line that refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch._dynamo.utils import counters

keras = pytest.importorskip("keras")

from tests.integrations.programs import keras_models as KERAS  # noqa: E402

import lockstep as ls  # noqa: E402
from lockstep.errors import ConfigError  # noqa: E402
from lockstep.integrations.keras import distribute  # noqa: E402

EXACT = 1e-6


@pytest.fixture(autouse=True)
def _one_compiler(nothing_compiled: None) -> Iterator[None]:
    with torch._inductor.config.patch(compile_threads=1):
        yield


def trained(model: Callable[[], Any], strategy: ls.Strategy, fitted: dict[str, Any], *, jit: bool) -> Any:
    program = KERAS.Program(
        model=model,
        compiled=lambda made: made.compile(
            "sgd", {"kind": KERAS.entropy(), "size": "mse"}, metrics={"kind": ["accuracy"]}, jit_compile=jit
        ),
        fitted=fitted,
    )
    return KERAS.train(program, strategy, sync_batchnorm=False)


class Everything(keras.Model):
    """Masks, seeds, statistics, a loss and a metric of its own, two inputs, and a dictionary of outputs."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(20, 6, mask_zero=True)
        self.noise = keras.layers.GaussianNoise(0.1, seed=5)
        self.drop = keras.layers.Dropout(0.5, seed=seed)
        self.norm, self.pool = keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling1D()
        self.kind = keras.layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")
        self.size = keras.layers.Dense(1)
        self.lengths = keras.metrics.Mean(name="length")

    def call(self, inputs: Any, training: bool = False) -> Any:
        words = self.words(inputs["words"])
        pooled = self.norm(self.pool(words), training=training)
        self.add_loss(0.1 * keras.ops.mean(pooled**2))
        self.lengths.update_state(keras.ops.sum(keras.ops.abs(inputs["numbers"]), axis=1))
        hidden = self.drop(self.noise(inputs["numbers"], training=training), training=training)
        return {"kind": self.kind(words), "size": self.size(keras.ops.concatenate([pooled, hidden], axis=1))}


INPUTS = {"words": KERAS.TOKENS, "numbers": KERAS.X}
FITTED = {"x": INPUTS, "y": {"kind": KERAS.TOKENS % 4, "size": KERAS.X[:, :1]}}


@pytest.mark.slow
def test_weights_history_and_outputs_are_those_of_the_uncompiled_model(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    expected, history = trained(partial(Everything, 3), strategy, FITTED, jit=False)

    model, found = trained(partial(Everything, 3), strategy, FITTED, jit=True)

    # Two full batches an epoch in one code, made once; the last batch, of two rows, has none.
    assert counters["aot_autograd"]["total"] == 1
    assert KERAS.largest_difference(model.get_weights(), expected.get_weights()) < EXACT
    assert KERAS.largest_difference(found, history) < 20 * EXACT
    outputs = (each.predict(INPUTS, batch_size=34, verbose=0) for each in (model, expected))
    assert KERAS.largest_difference(*outputs) < 10 * EXACT
    assert counters["aot_autograd"]["total"] == 2


@pytest.mark.slow
def test_a_rerun_that_draws_by_compiled_code_has_the_same_bits(make_strategy: MakeStrategy):
    (first, _), (again, _) = (trained(partial(Everything, None), make_strategy(2), FITTED, jit=True) for _ in range(2))
    assert KERAS.largest_difference(first.get_weights(), again.get_weights()) == 0.0


def nested(strategy: ls.Strategy) -> Any:
    inner = distribute(dense(keras.Sequential), strategy)
    return distribute(keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(2)]), strategy)


def uneven_batches() -> Iterator[Any]:
    """Batches of 2, 3 and 4 rows in turn, 20 rows in all."""
    for number in range(7):
        begin = number // 3 * 9 + (0, 2, 5)[number % 3]
        yield (KERAS.X[begin : min(begin + 2 + number % 3, 20)],)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_predict_before_any_training_compiles_once_and_ends(make_strategy: MakeStrategy):
    made = nested(make_strategy(2))
    made.compile("sgd", "mse", jit_compile=True)
    outputs = made.predict(uneven_batches(), verbose=0)
    expected = made(KERAS.X[:20]).detach().numpy()
    assert KERAS.largest_difference([outputs], [expected]) < EXACT
    assert counters["aot_autograd"]["total"] == 1  # a shard of one row; batches of other sizes run uncompiled


class Branching(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x if keras.ops.sum(keras.ops.square(x)) >= 0 else -x


class WithLoss(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.losses.MeanSquaredError()(x, 2 * x))
        return x


class Exchanging(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        context = ls.get_replica_context()
        return x if context is None else x + 0.0 * context.all_reduce("sum", x.sum())


class ByItself(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {"loss": self(data[0]).mean()}


def dense(kind: Any, *between: Any) -> Any:
    return kind([keras.Input((8,)), *between, keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("model", "synced", "said"),
    [
        (lambda: dense(keras.Sequential, Branching()), False, "jit_compile=True cannot take the whole forward pass"),
        (lambda: dense(keras.Sequential, WithLoss()), False, "computes a loss of Keras in its call"),
        (lambda: dense(keras.Sequential, Exchanging()), False, "exchanges values"),
        (lambda: dense(keras.Sequential, keras.layers.BatchNormalization()), True, "sync_batchnorm=True"),
        (lambda: dense(ByItself), False, "ByItself.train_step"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    model: Callable[[], Any], synced: bool, said: str, make_strategy: MakeStrategy
):
    made = distribute(model(), make_strategy(2), sync_batchnorm=synced)
    made.compile("sgd", KERAS.entropy(), jit_compile=True)
    before = made.get_weights()
    with pytest.raises(ConfigError) as refused:
        made.fit(KERAS.X, KERAS.LABELS, batch_size=34, verbose=0)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert KERAS.largest_difference(made.get_weights(), before) == 0.0
