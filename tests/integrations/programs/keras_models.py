"""Keras models, their data and how they are trained: by Keras alone on one device, or on replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers

import lockstep as ls
from lockstep.integrations.keras import distribute

RANDOM = np.random.default_rng(0)
ROWS = 70  # batches of 34, 34 and 2: three replicas have one without rows
BATCH = 34
X = RANDOM.normal(size=(ROWS, 8)).astype("float32")
LABELS = RANDOM.integers(0, 3, size=ROWS)
WEIGHTS = RANDOM.uniform(size=ROWS).astype("float32")
IMAGES = RANDOM.normal(size=(ROWS, 10, 10, 3)).astype("float32")
TOKENS = RANDOM.integers(1, 20, size=(ROWS, 9))
TOKENS[np.arange(9)[None] >= RANDOM.integers(2, 10, size=ROWS)[:, None]] = 0  # ragged, 0 being the padding
LOOP_BATCHES = [(torch.from_numpy(IMAGES[at : at + 16]), torch.from_numpy(LABELS[at : at + 16])) for at in (0, 16, 68)]
ENTROPY = "SparseCategoricalCrossentropy"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a user writes: a model, how it is compiled, and what it is fitted on."""

    model: Callable[[], keras.Model]
    compiled: Callable[[keras.Model], None]
    fitted: dict[str, Any]


class Subclassed(keras.Model):
    """Has a step of its own around Keras's, a metric of its own, and a loss that a layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(3)
        self.largest = keras.metrics.Mean(name="size")
        self.steps = 0

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.hidden(x)
        self.add_loss(0.1 * keras.ops.mean(hidden**2))
        self.largest.update_state(keras.ops.mean(keras.ops.abs(hidden), axis=1))
        return self.out(hidden)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        found = super().train_step((x * 2.0, y))
        self.steps += 1
        return {**found, "steps": self.steps}


class Masked(keras.Model):
    """Computes its own loss: a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred[:, 0] - keras.ops.cast(y, "float32")))


def sequential() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu", kernel_regularizer="l2", activity_regularizer="l1"),
            layers.LayerNormalization(),
            layers.Dense(3),
        ]
    )


def functional() -> keras.Model:
    images, vectors = keras.Input((10, 10, 3), name="images"), keras.Input((8,), name="vectors")
    hidden = layers.Conv2D(6, 3, strides=2)(images)
    hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
    hidden = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(layers.DepthwiseConv2D(3)(hidden)))
    hidden = layers.Concatenate()([hidden, vectors])
    return keras.Model(
        [images, vectors], {"kind": layers.Dense(3, name="kind")(hidden), "size": layers.Dense(1)(hidden)}
    )


def recurrent() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((9,)),
            layers.Embedding(20, 8, mask_zero=True),
            layers.GRU(6, return_sequences=True),
            layers.Dense(4),
        ]
    )


def partly_frozen() -> keras.Model:
    model = sequential()
    model.layers[0].trainable = False
    return model


def entropy(reduction: str = "sum_over_batch_size") -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


PROGRAMS = {
    "sequential": Program(
        model=sequential,
        compiled=lambda model: model.compile(
            keras.optimizers.Adam(0.01), entropy(), metrics=["accuracy"], weighted_metrics=[top_2()]
        ),
        fitted={"x": X, "y": LABELS, "sample_weight": WEIGHTS, "validation_split": 0.1},
    ),
    "functional": Program(
        model=functional,
        compiled=lambda model: model.compile(
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 20), momentum=0.9, global_clipnorm=0.5),
            {"kind": entropy("mean_with_sample_weight"), "size": "huber"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae", keras.metrics.RootMeanSquaredError()]},
        ),
        fitted={
            "x": [IMAGES, X],
            "y": {"kind": LABELS, "size": IMAGES.mean((1, 2, 3))[:, None]},
            "sample_weight": {"kind": WEIGHTS, "size": WEIGHTS[::-1].copy()},
        },
    ),
    "recurrent": Program(
        model=recurrent,
        compiled=lambda model: model.compile("adamw", entropy(), metrics=["accuracy"]),
        fitted={"x": TOKENS, "y": TOKENS % 4},
    ),
    "subclassed": Program(
        model=Subclassed,
        compiled=lambda model: model.compile("rmsprop", entropy("sum"), metrics=["accuracy"]),
        fitted={"x": X, "y": LABELS},
    ),
    "own loss": Program(
        model=Masked, compiled=lambda model: model.compile("adam"), fitted={"x": X, "y": LABELS, "shuffle": False}
    ),
    "class weights, frozen": Program(
        model=partly_frozen,
        compiled=lambda model: model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True), entropy()
        ),
        fitted={"x": X, "y": LABELS, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
    ),
}


LOOP_OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 20), global_clipnorm=0.1),
    "scaled sgd": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=64.0
    ),
}


class Counted(layers.Layer):
    """Holds numbers of its own: a sum over rows, a count of rows, a count of batches, and the mean of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_weight(shape=(8,), initializer="zeros", trainable=False, aggregation="sum")
        self.rows = self.add_weight(initializer="zeros", dtype="int32", trainable=False, aggregation="sum")
        self.batches = self.add_weight(initializer="zeros", trainable=False, aggregation="only_first_replica")
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.total.assign_add(keras.ops.sum(x, axis=0))
        self.rows.assign_add(keras.ops.shape(x)[0])
        self.batches.assign_add(1.0)
        self.size.update_state(keras.ops.mean(keras.ops.abs(x)))
        return x


def with_states() -> keras.Model:
    hidden = layers.SpectralNormalization(layers.Dense(6))
    return keras.Sequential([keras.Input((8,)), Counted(), hidden, layers.Dense(3)])


def autoencoder() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((10, 10, 3)),
            layers.Conv2D(4, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2, padding="same"),
            layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same"),
            layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
        ]
    )


def tagger() -> keras.Model:
    return keras.Sequential([keras.Input((9,)), layers.Embedding(20, 8, mask_zero=True), layers.Dense(4)])


class TorchModules(keras.Model):
    """Of torch's modules, with buffers, and with one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.nn.Linear(8, 8)
        self.inner = torch.nn.Sequential(shared, torch.nn.BatchNorm1d(8), torch.nn.ReLU(), shared)
        self.frozen = layers.TorchModuleWrapper(torch.nn.Linear(8, 8), trainable=False)
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(self.frozen(self.inner(x)))


class Measured(keras.Sequential):
    """Reports a metric of its own, as in Keras's documentation of ``compute_metrics``, and other numbers."""

    def __init__(self) -> None:
        super().__init__([keras.Input((8,)), layers.Dense(3)])
        self.largest = keras.metrics.MeanAbsoluteError(name="largest")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(y, keras.ops.max(y_pred, axis=1))
        found["largest"] = self.largest.result()
        return {**found, "twice": 2.0 * found["accuracy"], "size": mean_size(y, y_pred), "kind": 7}


class Clipped(keras.Model):
    """Computes its steps itself, with an average of the weights beside them, and clips gradients by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = layers.Dense(6), layers.BatchNormalization(), layers.Dense(3)
        self.average = layers.Dense(6)
        self.largest = keras.metrics.MeanAbsoluteError(name="largest")

    def build(self, shape: Any) -> None:
        self.average.build(shape)
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(keras.ops.tanh(self.norm(self.hidden(x), training=training)))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = data
        self.zero_grad()
        outputs = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=outputs, sample_weight=weight)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        weights = [each for each in self.trainable_weights if each.value.grad is not None]
        with torch.no_grad():
            self.optimizer.apply([each.value.grad for each in weights], weights)
        self.average.kernel.assign(0.9 * self.average.kernel + 0.1 * self.hidden.kernel)
        return {**self._updated(y, outputs, loss), "norm": norm, "plain": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        outputs = self(x)
        return self._updated(y, outputs, self.compute_loss(y=y, y_pred=outputs))

    def predict_step(self, data: Any) -> Any:
        return 2.0 * self(data)

    def _updated(self, y: Any, outputs: Any, loss: Any) -> dict[str, Any]:
        self.largest.update_state(y, keras.ops.max(outputs, axis=1))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif metric is not self.largest:
                metric.update_state(y, outputs)
        found = {each.name: each.result() for each in self.metrics if each.name != "compile_metrics"}
        return {**found, "twice": 2.0 * self.largest.result()}


class Adversarial(keras.Model):
    """Two models, an optimizer each, and a penalty on the gradients of inputs."""

    def __init__(self) -> None:
        super().__init__()
        hidden = layers.Dense(8, activation="tanh", activity_regularizer="l2")
        self.maker = keras.Sequential([keras.Input((4,)), hidden])
        self.judge = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.losses_of_judge, self.losses_of_maker = keras.metrics.Mean(name="judge"), keras.metrics.Mean(name="maker")
        self.sizes = keras.metrics.Mean(name="size")
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self) -> list[Any]:
        return [self.losses_of_judge, self.losses_of_maker, self.sizes]

    def compile(self, **optimizers: Any) -> None:
        super().compile()
        self.of_judge, self.of_maker = optimizers["of_judge"], optimizers["of_maker"]

    def call(self, x: Any) -> Any:
        return self.judge(self.maker(x[:, :4]))

    def train_step(self, real: Any) -> dict[str, Any]:
        made, ones = self.maker(real[:, :4]), torch.ones((len(real), 1))
        judged = torch.cat([self.judge(real), self.judge(made)])
        loss = self.entropy(torch.cat([ones, 0 * ones]), judged) + self._penalty((real + made).detach())
        self._update(self.judge, loss, self.of_judge)
        self.losses_of_judge.update_state(loss)
        loss = self.entropy(ones, self.judge(self.maker(real[:, :4]))) + sum(self.maker.losses)
        self._update(self.maker, loss, self.of_maker)
        self.sizes.update_state(sum(self.maker.losses))
        self.losses_of_maker.update_state(loss)
        return {each.name: each.result() for each in self.metrics}

    def _penalty(self, inputs: Any) -> Any:
        judged = self.judge(inputs.requires_grad_())
        slopes = torch.autograd.grad(judged, inputs, torch.ones_like(judged), create_graph=True)[0]
        return keras.ops.mean(keras.ops.sum(slopes**2, axis=1))

    def _update(self, model: Any, loss: Any, optimizer: Any) -> None:
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)


PUBLISHED = {
    "own steps": Program(
        model=Clipped,
        compiled=lambda model: model.compile("sgd", entropy(), metrics=["accuracy"]),
        fitted={"x": X, "y": LABELS, "sample_weight": WEIGHTS, "validation_data": (X[:35], LABELS[:35])},
    ),
    "own step of two models": Program(
        model=Adversarial,
        compiled=lambda model: model.compile(
            of_judge=keras.optimizers.Adam(0.01), of_maker=keras.optimizers.SGD(0.1, momentum=0.9)
        ),
        fitted={"x": X},
    ),
    "own metrics": Program(
        model=Measured,
        compiled=lambda model: model.compile("adam", entropy(), metrics=["accuracy"]),
        fitted={"x": X, "y": LABELS, "sample_weight": WEIGHTS, "validation_split": 0.1},
    ),
    "autoencoder": Program(
        model=autoencoder,
        compiled=lambda model: model.compile("adam", "binary_crossentropy"),
        fitted={"x": IMAGES, "y": (IMAGES[..., :1] > 0).astype("float32")},
    ),
    "weights of time steps": Program(
        model=tagger,
        compiled=lambda model: model.compile("adam", entropy()),
        fitted={"x": TOKENS, "y": TOKENS % 4, "sample_weight": RANDOM.uniform(size=TOKENS.shape).astype("float32")},
    ),
    "torch modules": Program(
        model=TorchModules,
        compiled=lambda model: model.compile("sgd", entropy(), metrics=["accuracy"]),
        fitted={"x": X, "y": LABELS, "validation_split": 0.1},
    ),
    "layers with states": Program(
        model=with_states,
        compiled=lambda model: model.compile("sgd", entropy(), metrics=[mean_size]),
        fitted={"x": X, "y": LABELS},
    ),
}
"""After programs of keras.io."""


def mean_size(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_pred))


def top_2() -> keras.Metric:
    return keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")


def train(
    program: Program, strategy: ls.Strategy | None, *, epochs: int = 2, sync_batchnorm: bool = True
) -> tuple[Any, dict[str, list[float]]]:
    """Trains on the replicas of a strategy, or by Keras alone. Returns the model and its history."""
    keras.utils.set_random_seed(1)
    model = program.model()
    if strategy is not None:
        model = distribute(model, strategy, sync_batchnorm=sync_batchnorm)
    program.compiled(model)
    keras.utils.set_random_seed(2)
    history = model.fit(**program.fitted, batch_size=BATCH, epochs=epochs, verbose=0)
    return model, history.history


class Network(keras.Model):
    """Not built before its first call; has batch norm, frozen weights and regularised ones."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = layers.Conv2D(6, 3, strides=2, use_bias=False, kernel_regularizer="l2")
        self.norm, self.pool = layers.BatchNormalization(), layers.GlobalAveragePooling2D()
        self.frozen = layers.Dense(8, activation="tanh", trainable=False)
        self.out = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = keras.ops.relu(self.norm(self.convolution(x), training=training))
        return self.out(self.frozen(self.pool(hidden)))


class Loop:
    """A model, an optimizer and a metric, and a step as TensorFlow's guide of distributed loops has it."""

    def __init__(self, optimizer: Any) -> None:
        self.model, self.optimizer = Network(), optimizer
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(self, x: Any, y: Any) -> Any:
        logits = self.model(x, training=True)
        loss = ls.compute_average_loss(self.loss(y, logits))
        loss = loss + ls.scale_regularization_loss(sum(self.model.losses))
        self.model.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        weights = self.model.trainable_weights
        gradients = [each.value.grad for each in weights]
        with torch.no_grad():
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.accuracy.update_state(y, logits)
        return loss.detach()


class Interruption(keras.callbacks.Callback):
    """Raises an InterruptedError after so many batches of the second epoch."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches, self.epoch = batches, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 1 and batch + 1 == self.batches:
            raise InterruptedError


def train_with_dropout(strategy: ls.Strategy, *callbacks: Any, seed: int = 1) -> list[Any]:
    """Trains with dropout and rows in random order. Returns the weights."""
    keras.utils.set_random_seed(seed)
    model = distribute(keras.Sequential([keras.Input((8,)), layers.Dropout(0.4), layers.Dense(3)]), strategy)
    model.compile("adam", entropy())
    model.fit(X, LABELS, batch_size=5, epochs=2, verbose=0, callbacks=list(callbacks))
    weights: list[Any] = model.get_weights()
    return weights


def train_in_loop(optimizer: str, strategy: ls.Strategy | None) -> dict[str, list[Any]]:
    """Trains in a loop of its own. Returns losses and accuracies, the weights, and the optimizer's state."""
    keras.utils.set_random_seed(1)
    loop, seen = Loop(LOOP_OPTIMIZERS[optimizer]()), []
    if strategy is not None:
        distribute(loop.model, strategy, sync_batchnorm=True)
    for _ in range(2):
        for batch in LOOP_BATCHES if strategy is None else strategy.distribute_dataset(LOOP_BATCHES):
            losses = loop.step(*batch) if strategy is None else strategy.run(loop.step, args=batch)
            seen.append(float(losses if strategy is None else strategy.reduce("SUM", losses)))
        seen.append(float(loop.accuracy.result()))
    state = [each.numpy() for each in loop.optimizer.variables]
    return {"seen": seen, "weights": loop.model.get_weights(), "state": state}


def largest_difference(one: Any, other: Any) -> float:
    """Of two lists of arrays, or of the values of two dicts; relative for numbers above 1."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = ([each[key] for key in one] for each in (one, other))
    pairs = list(zip(map(np.asarray, one), map(np.asarray, other), strict=True))
    assert all(first.shape == second.shape for first, second in pairs)
    return max(float((np.abs(first - second) / np.maximum(1.0, np.abs(second))).max()) for first, second in pairs)
