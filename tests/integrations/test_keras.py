"""Keras models on replicas beside the same programs by Keras alone on one device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy

keras = pytest.importorskip("keras")

from tests.integrations.programs import keras_models as KERAS  # noqa: E402

import lockstep as ls  # noqa: E402
from lockstep.errors import ConfigError, DataError, UsageError  # noqa: E402
from lockstep.integrations.keras import distribute  # noqa: E402

EXACT = 1e-6


@pytest.fixture(scope="module")
def alone() -> Callable[[str], tuple[Any, dict[str, list[float]]]]:
    """``alone(name)``: a program's model and history by Keras alone, computed once."""
    found: dict[str, Any] = {}

    def train(name: str) -> tuple[Any, dict[str, list[float]]]:
        if name not in found:
            found[name] = KERAS.train(KERAS.PROGRAMS[name], None)
        model, history = found[name]
        return model, history

    return train


def compiled(model: Any, **settings: Any) -> Any:
    settings = {"optimizer": "adam", "loss": KERAS.entropy(), **settings}
    model.compile(**settings)
    return model


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", list(KERAS.PROGRAMS))
def test_weights_and_history_are_those_of_keras_alone(
    name: str, replicas: int, make_strategy: MakeStrategy, alone: Callable[[str], Any]
):
    expected, history = alone(name)

    model, found = KERAS.train(KERAS.PROGRAMS[name], make_strategy(replicas))

    assert KERAS.largest_difference(model.get_weights(), expected.get_weights()) < EXACT
    assert KERAS.largest_difference(found, history) < 20 * EXACT
    outputs, expected_outputs = (
        each.predict(KERAS.PROGRAMS[name].fitted["x"], verbose=0) for each in (model, expected)
    )
    assert KERAS.largest_difference(outputs, expected_outputs) < 10 * EXACT
    state, expected_state = ([each.numpy() for each in one.optimizer.variables] for one in (model, expected))
    assert KERAS.largest_difference(state, expected_state) < EXACT


class OwnMetrics(keras.Model):
    """As in Keras's documentation of ``compute_loss``: ``metrics`` leaves out Keras's own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.tracked = keras.metrics.Mean(name="tracked")

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        loss = keras.ops.mean((y_pred[:, 0] - keras.ops.cast(y, "float32")) ** 2)
        self.tracked.update_state(loss, sample_weight=keras.ops.shape(y_pred)[0])
        return loss

    @property
    def metrics(self) -> list[Any]:
        return [self.tracked]


def test_a_model_with_its_own_property_metrics(make_strategy: MakeStrategy):
    program = KERAS.Program(
        model=OwnMetrics, compiled=lambda model: model.compile("sgd"), fitted={"x": KERAS.X, "y": KERAS.LABELS}
    )
    expected, history = KERAS.train(program, None)
    model, found = KERAS.train(program, make_strategy(3))
    assert list(found) == ["tracked"]
    assert KERAS.largest_difference(found, history) < 20 * EXACT
    assert KERAS.largest_difference(model.get_weights(), expected.get_weights()) < EXACT


class AddsLoss(keras.layers.Layer):
    """Adds a loss for rows of one sign."""

    def __init__(self, sign: int, loss: torch.Tensor) -> None:
        super().__init__()
        self.sign, self.loss = sign, loss

    def call(self, x: Any) -> Any:
        if x[0, 0] * self.sign > 0:
            self.add_loss(self.loss)
        return x


def test_a_loss_counts_once_where_another_layer_has_one_with_its_id_in_another_replica(make_strategy: MakeStrategy):
    x, y = keras.ops.concatenate([keras.ops.ones((4, 2)), -keras.ops.ones((4, 2))]), keras.ops.zeros((8, 1))
    loss, dense = torch.tensor(0.5), keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((2,)), AddsLoss(1, loss), AddsLoss(-1, loss), dense])
    compiled(distribute(model, make_strategy(2)), optimizer=keras.optimizers.SGD(0.0), loss="mse")
    assert [model.train_on_batch(x, y) for _ in range(2)] == [0.5, 0.5]


METRICS = [
    "AUC",
    "BinaryAccuracy",
    "CosineSimilarity",
    "F1Score",
    "FalseNegatives",
    "Hinge",
    "KLDivergence",
    "LogCoshError",
    "Precision",
    "R2Score",
    "MeanAbsolutePercentageError",
    "Poisson",
    "Recall",
    "RootMeanSquaredError",
    "TruePositives",
]


def test_metrics_of_keras_have_the_values_of_one_device(make_strategy: MakeStrategy):
    found = []
    for strategy in (None, make_strategy(3)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, activation="sigmoid")])
        metrics = [getattr(keras.metrics, name)() for name in METRICS]
        model = compiled(model if strategy is None else distribute(model, strategy), loss="mse", metrics=metrics)
        targets = (KERAS.X[:, :2] > 0).astype("float32")
        found.append(model.evaluate(KERAS.X, targets, batch_size=34, verbose=0))

    assert len(found[0]) == len(METRICS) + 1
    assert KERAS.largest_difference(found[1], found[0]) < 20 * EXACT


@pytest.mark.parametrize(
    "optimizer",
    ["SGD", "RMSprop", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion", "Lamb", "Muon"],
)
def test_every_optimizer_updates_as_on_one_device(optimizer: str, make_strategy: MakeStrategy):
    weights = []
    for strategy in (None, make_strategy(2)):
        keras.utils.set_random_seed(1)
        model = KERAS.sequential()
        model = model if strategy is None else distribute(model, strategy)
        compiled(model, optimizer=getattr(keras.optimizers, optimizer)(0.01))
        for _ in range(3):
            model.train_on_batch(KERAS.X, KERAS.LABELS)
        weights.append(model.get_weights())

    assert KERAS.largest_difference(*weights) < 10 * EXACT


def test_a_batch_at_a_time(make_strategy: MakeStrategy):
    found = []
    for strategy in (None, make_strategy(3)):
        keras.utils.set_random_seed(1)
        model = KERAS.sequential()
        model = compiled(model if strategy is None else distribute(model, strategy), metrics=["accuracy"])
        trained = model.train_on_batch(KERAS.X, KERAS.LABELS, sample_weight=KERAS.WEIGHTS)
        tested = model.test_on_batch(KERAS.X[:2], KERAS.LABELS[:2])
        found.append([*trained, *tested, model.predict_on_batch(KERAS.X[:1]), model.predict(KERAS.X, verbose=0)])

    assert KERAS.largest_difference(*found) < 10 * EXACT


class Rows(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return KERAS.X[index::3], KERAS.LABELS[index::3]


def generated() -> Iterator[Any]:
    for index in range(3):
        yield KERAS.X[index::3], KERAS.LABELS[index::3]


def loader() -> Any:
    data = torch.utils.data.TensorDataset(torch.from_numpy(KERAS.X), torch.from_numpy(KERAS.LABELS))
    return torch.utils.data.DataLoader(data, batch_size=16)


@pytest.mark.parametrize("data", [Rows, generated, loader])
def test_data_that_keras_takes(data: Callable[[], Any], make_strategy: MakeStrategy):
    weights = []
    for strategy in (None, make_strategy(2)):
        keras.utils.set_random_seed(1)
        model = KERAS.sequential()
        compiled(model if strategy is None else distribute(model, strategy)).fit(data(), verbose=0)
        weights.append(model.get_weights())
    assert KERAS.largest_difference(*weights) < EXACT


@pytest.mark.parametrize("own_code", [False, True])
def test_a_rerun_with_dropout_has_the_same_bits_and_each_replica_draws_its_own_mask(
    own_code: bool, make_strategy: MakeStrategy
):
    masks: list[Any] = []

    def noted(y_true: Any, y_pred: Any) -> Any:
        masks.append(y_pred.detach().numpy() == 0)
        return y_true[:, 0] * 0

    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        dropout = keras.layers.Lambda(torch.nn.functional.dropout) if own_code else keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), dropout])
        compiled(distribute(model, make_strategy(2)), loss="mse", metrics=[noted])
        model.train_on_batch(KERAS.X[:8], KERAS.X[:8])
        trained, masks = masks[-2:], []
        model.fit(KERAS.X, KERAS.X, batch_size=34, epochs=2, verbose=0)
        runs.append(model.get_weights())

    assert KERAS.largest_difference(*runs) == 0.0
    assert (trained[0] != trained[1]).any()


def pooled() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((10, 10, 3)),
            layers.Conv2D(6, 3, padding="same", strides=2),
            layers.BatchNormalization(scale=False),
            layers.MaxPooling2D(padding="same"),
            layers.SeparableConv2D(8, 2, activation="relu6"),
            layers.BatchNormalization(center=False),
            layers.Conv2DTranspose(4, 2),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )


def test_the_kernels_of_one_replica_give_keras_s_numbers(make_strategy: MakeStrategy):
    # By SGD: Adam makes much of the gradients of biases before a batch norm, which are nothing but rounding.
    by_sgd = partial(compiled, optimizer="sgd")
    program = KERAS.Program(model=pooled, compiled=by_sgd, fitted={"x": KERAS.IMAGES, "y": KERAS.LABELS})
    expected, history = KERAS.train(program, None)
    model, found = KERAS.train(program, make_strategy(1), sync_batchnorm=False)
    assert KERAS.largest_difference(model.get_weights(), expected.get_weights()) < 10 * EXACT
    assert KERAS.largest_difference(found, history) < 20 * EXACT


class Noise(keras.layers.Layer):
    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.note = note

    def call(self, x: Any, training: bool = False) -> Any:
        drawn = keras.random.normal(keras.ops.shape(x))
        if training:
            self.note(drawn.detach().numpy().ravel()[:4].tolist())
        return x + 0.1 * drawn if training else x


def test_numbers_that_are_drawn_without_a_seed_differ_by_step_and_replica_and_repeat(make_strategy: MakeStrategy):
    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        seen: list[Any] = []
        model = keras.Sequential([keras.Input((8,)), Noise(seen.append), keras.layers.Dense(3)])
        compiled(distribute(model, make_strategy(2))).fit(KERAS.X[:64], KERAS.LABELS[:64], batch_size=32, verbose=0)
        runs.append(sorted(seen[-4:]))

    assert runs[0] == runs[1]
    assert len({tuple(each) for each in runs[0]}) == 4


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Dropout(0.5),
        lambda: keras.layers.MixUp(),  # draws from a beta distribution
        lambda: keras.layers.Lambda(torch.nn.functional.dropout),
    ],
    ids=["dropout", "mix_up", "own code"],
)
def test_layers_that_draw_from_torch_s_default_generator_draw_from_the_replica_s(
    layer: Callable[[], Any], make_strategy: MakeStrategy
):
    model = keras.Sequential([keras.Input((10, 10, 3)), layer(), keras.layers.Flatten(), keras.layers.Dense(3)])
    compiled(distribute(model, make_strategy(2)))
    before = torch.get_rng_state()
    for _ in range(2):
        model.train_on_batch(KERAS.IMAGES[:8], KERAS.LABELS[:8])
    assert torch.equal(torch.get_rng_state(), before)


def test_with_replicas_given_the_bits_are_the_same_on_any_devices(split_cpu: Callable[[int], tuple[Any, ...]]):
    found = []
    for devices in (1, 2, 3):
        with closing(ls.MirroredStrategy(split_cpu(4)[:devices], replicas=4, seed=0)) as strategy:
            found.append(KERAS.train(KERAS.PROGRAMS["functional"], strategy)[0].get_weights())
    assert KERAS.largest_difference(found[0], found[1]) == KERAS.largest_difference(found[0], found[2]) == 0.0


def test_without_synchronisation_moving_statistics_are_averaged_over_the_rows(make_strategy: MakeStrategy):
    model = distribute(
        keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(momentum=0.0)]), make_strategy(3)
    )
    model.compile("sgd", "mse")
    model.train_on_batch(KERAS.X[:7], KERAS.X[:7])
    shards = [KERAS.X[:3], KERAS.X[3:5], KERAS.X[5:7]]

    norm = model.layers[0]

    assert KERAS.largest_difference([norm.moving_mean.numpy()], [KERAS.X[:7].mean(0)]) < EXACT
    variance = sum(len(shard) * shard.var(0) for shard in shards) / 7
    assert KERAS.largest_difference([norm.moving_variance.numpy()], [variance]) < EXACT


def test_callbacks_checkpoints_and_saved_models_are_keras_s(make_strategy: MakeStrategy, tmp_path: Path):
    keras.utils.set_random_seed(1)
    model = compiled(distribute(KERAS.sequential(), make_strategy(2)), metrics=["accuracy"])
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="loss", save_best_only=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
    ]

    model.fit(KERAS.X, KERAS.LABELS, epochs=3, verbose=0, callbacks=callbacks)

    assert float(model.optimizer.learning_rate) < 1e-3
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    loaded = keras.models.load_model(tmp_path / "best.keras")
    assert type(loaded) is keras.Sequential
    assert KERAS.largest_difference([loaded.predict(KERAS.X, verbose=0)], [model.predict(KERAS.X, verbose=0)]) < EXACT
    assert (
        KERAS.largest_difference(
            [loaded.evaluate(KERAS.X, KERAS.LABELS, verbose=0)], [model.evaluate(KERAS.X, KERAS.LABELS, verbose=0)]
        )
        < 10 * EXACT
    )
    again = compiled(distribute(loaded, make_strategy(3)))
    again.fit(KERAS.X, KERAS.LABELS, verbose=0)
    for each in (model, distribute(KERAS.functional(), make_strategy(2))):
        clone, remade = keras.models.clone_model(each), type(each).from_config(each.get_config())
        assert type(clone) is type(remade) is type(each).__mro__[1]
        clone.summary(print_fn=str)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_keras_s(precision: str, make_strategy: MakeStrategy):
    losses = []
    for strategy in (None, make_strategy(2)):
        keras.utils.set_random_seed(1)
        policy = keras.DTypePolicy(precision)
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, dtype=policy), keras.layers.Dense(3, dtype=policy)]
        )
        model = compiled(model if strategy is None else distribute(model, strategy))
        losses.append(model.fit(KERAS.X, KERAS.LABELS, epochs=2, verbose=0).history["loss"])

    assert KERAS.largest_difference(*losses) < 1e-2


def contrast(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred[:, 0]))) + 0.0 * keras.ops.mean(y_true)


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


def one_output() -> Any:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])


class ByItself(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        return keras.Model.train_step(self, data)


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        (KERAS.sequential, {"loss": contrast}, "loss"),
        (KERAS.sequential, {"metrics": [Largest()]}, "'largest'"),
        (one_output, {"loss": "mse", "metrics": [keras.metrics.PearsonCorrelation("r", axis=0)]}, "'r'"),
        (lambda: ByItself([keras.Input((8,)), keras.layers.Dense(3)]), {}, "ByItself.train_step"),
    ],
)
def test_what_replicas_cannot_compute_is_refused_in_one_line(
    model: Callable[[], Any], settings: dict[str, Any], named: str, make_strategy: MakeStrategy
):
    keras.utils.set_random_seed(1)
    ours = compiled(distribute(model(), make_strategy(2)), **settings)
    with pytest.raises(ConfigError, match=named) as refused:
        ours.fit(KERAS.X, KERAS.LABELS, verbose=0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [Rows, generated, loader])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_batch_size_beside_batches_is_refused(method: str, data: Callable[[], Any], make_strategy: MakeStrategy):
    model = compiled(distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), make_strategy(1)))
    with pytest.raises(ConfigError, match="batch_size=4") as refused:
        getattr(model, method)(data(), batch_size=4, verbose=0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, y: model.fit(x, y),
        lambda model, x, y: model.fit(x, x[:, 0], sample_weight=y),
        lambda model, x, y: model.fit(x, x[:, 0], validation_data=(x, y)),
        lambda model, x, y: model.evaluate(x, y),
        lambda model, x, y: model.predict([x, y]),
        lambda model, x, y: model.train_on_batch(x, y),
        lambda model, x, y: model.test_on_batch(x, y),
    ],
)
def test_arrays_of_different_lengths_are_refused_in_one_line(call: Callable[..., Any], make_strategy: MakeStrategy):
    model = compiled(distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), make_strategy(2)))
    with pytest.raises(DataError, match=r"70.* 69") as refused:
        call(model, KERAS.X, KERAS.LABELS[:69])
    assert "\n" not in str(refused.value)


def test_a_callback_of_lockstep_is_refused_with_the_name_of_keras_s(make_strategy: MakeStrategy):
    model = compiled(distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), make_strategy(1)))
    for given in (ls.EarlyStopping(), [ls.EarlyStopping()]):
        with pytest.raises(ConfigError, match=r"keras\.callbacks\.EarlyStopping"):
            model.fit(KERAS.X, KERAS.LABELS, callbacks=given, verbose=0)


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_backend_that_is_not_installed_is_refused_with_what_to_set(backend: str):
    program = "from lockstep.errors import ConfigError\ntry:\n    import lockstep.integrations.keras\n"
    program += "except ConfigError as error:\n    print(error)"
    environment = {**os.environ, "KERAS_BACKEND": backend}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )

    (line,) = done.stdout.splitlines()
    assert backend in line
    assert "KERAS_BACKEND=torch" in line


def test_models_that_cannot_be_distributed(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with pytest.raises(TypeError, match="Linear"):
        distribute(torch.nn.Linear(2, 2), strategy)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="str"):
        distribute(KERAS.sequential(), "mirrored")  # type: ignore[arg-type]
    stateful = keras.Sequential([keras.Input(batch_shape=(4, 9, 8)), keras.layers.GRU(3, stateful=True, name="inner")])
    with pytest.raises(ConfigError, match="'inner'"):
        distribute(stateful, strategy)
    model = distribute(KERAS.sequential(), strategy)
    assert distribute(model, strategy) is model
    with pytest.raises(UsageError, match="another strategy"):
        distribute(model, make_strategy(3))
