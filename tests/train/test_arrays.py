"""fit, evaluate and predict on arrays, beside hand-written loops over DataLoaders on one device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_close, sgd, train
from tests.train.conftest import MakeStrategy, compiled, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import ConfigError, DataError
from lockstep.train.callbacks import BackupAndRestore, LambdaCallback
from lockstep.train.model import Model

CLASSES = {0: 1.0, 1: 2.5, 2: 0.5}


def rows(number: int = 22) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(number, 4, generator=random), torch.randint(3, (number,), generator=random)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(4, 3)


def make_model(strategy: Any, module: nn.Module | None = None) -> Model:
    return compiled(module or network(), strategy, sgd, nn.CrossEntropyLoss(reduction="none"))


def by_hand(x: Tensor, y: Tensor, weight: Tensor | None = None) -> list[Tensor]:
    """The weights after a plain loop over a shuffling DataLoader."""
    module = network()
    rows = TensorDataset(x, y, torch.ones(len(x)) if weight is None else weight)
    torch.manual_seed(11)
    loss = nn.CrossEntropyLoss(reduction="none")
    return [*train(module, DataLoader(rows, 5, shuffle=True), sgd, loss, epochs=2).module.parameters()]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("convert", [lambda x, y: (x, y), lambda x, y: (x.double().numpy(), y.numpy())])
def test_the_order_of_rows_is_that_of_a_shuffling_data_loader(make_strategy: MakeStrategy, replicas: int, convert: Any):
    x, y = rows()
    model = make_model(make_strategy(replicas))
    torch.manual_seed(11)
    history = model.fit(*convert(x, y), 5, 2, verbose=0)
    assert [timing.steps for timing in history.timing] == [5, 5]
    assert_close(weights(model), by_hand(x, y), 1e-6)


def test_class_and_sample_weights_multiply_the_losses(make_strategy: MakeStrategy):
    x, y = rows()
    sample_weight = torch.rand(len(x))
    model = make_model(make_strategy(2))
    torch.manual_seed(11)
    model.fit(x, y, 5, 2, class_weight=CLASSES, sample_weight=sample_weight, verbose=0)
    expected = by_hand(x, y, sample_weight * torch.tensor([CLASSES[int(label)] for label in y]))
    assert_close(weights(model), expected, 1e-6)


def test_class_weight_reads_one_hot_targets_and_numbers_of_numpy(make_strategy: MakeStrategy):
    x, y = rows()
    model, other = make_model(make_strategy(2)), make_model(make_strategy(2))
    of_numpy = dict(zip(np.arange(3), np.float32(list(CLASSES.values())), strict=True))
    for each, targets, factors in ((model, y, CLASSES), (other, nn.functional.one_hot(y, 3).float(), of_numpy)):
        each.fit(x, targets, shuffle=False, class_weight=factors, verbose=0)  # type: ignore[arg-type]  # NumPy's numbers
    assert_close(weights(model), weights(other), 1e-6)


def test_the_last_rows_validate_before_shuffling(make_strategy: MakeStrategy):
    x, y = rows()
    model = make_model(make_strategy(2))
    torch.manual_seed(11)
    history = model.fit(x, y, 5, 2, validation_split=0.25, class_weight=CLASSES, verbose=0)
    trained = by_hand(x[:16], y[:16], torch.tensor([CLASSES[int(label)] for label in y[:16]]))
    assert_close(weights(model), trained, 1e-6)
    loss = nn.functional.cross_entropy(nn.functional.linear(x[16:], *trained), y[16:]).item()
    assert history.history["val_loss"][-1] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_validation_data_is_a_tuple_of_arrays(make_strategy: MakeStrategy, weighted: bool):
    x, y = rows()
    weight = torch.arange(6.0)
    model = make_model(make_strategy(2))
    held_out = (x[:6].numpy(), y[:6].numpy(), *([weight.numpy()] if weighted else []))
    history = model.fit(x, y, validation_data=held_out, verbose=0)
    losses = nn.functional.cross_entropy(model.predict(x[:6]), y[:6], reduction="none")
    expected = (losses * weight if weighted else losses).mean().item()
    assert history.history["val_loss"] == [pytest.approx(expected, abs=1e-6)]


def test_validation_takes_its_own_batch_size_and_the_first_batches(make_strategy: MakeStrategy):
    x, y = rows()
    model, sizes = make_model(make_strategy(2)), []
    count = LambdaCallback(on_test_batch_begin=lambda batch, logs: sizes.append(batch))
    held_out, settings = (x[:10], y[:10]), {"epochs": 2, "shuffle": False, "callbacks": [count], "verbose": 0}

    history = model.fit(
        x, y, 5, validation_data=held_out, validation_batch_size=3, validation_steps=2, **settings
    ).history["val_loss"]

    first = nn.functional.cross_entropy(nn.functional.linear(x[:6], *weights(model)), y[:6]).item()
    assert history[-1] == pytest.approx(first, abs=1e-6)
    assert sizes == [0, 1, 0, 1]
    batches = ((x[start : start + 3], y[start : start + 3]) for _ in range(2) for start in (0, 3, 6))
    other = make_model(make_strategy(2))
    endless = other.fit(x, y, 5, validation_data=batches, validation_steps=2, **(settings | {"epochs": 1}))
    assert endless.history["val_loss"] == [pytest.approx(history[0], abs=1e-6)]
    few = other.fit(x, y, 5, validation_split=0.5, validation_batch_size=4, validation_steps=9, **settings)
    assert few.epoch == [0, 1]


class TwoInputs(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.left, self.right, self.outputs = nn.Linear(2, 3), nn.Linear(2, 3), outputs

    def forward(self, left: Tensor, right: Tensor) -> Any:
        one = self.left(left) - self.right(right)
        return one if self.outputs == 1 else (one, self.left(right) - self.right(left))


def test_several_inputs_are_a_dict_or_a_tuple(make_strategy: MakeStrategy):
    x, y = rows(2 * 4)  # batches of 2 rows, which a list of 2 inputs could be mistaken for
    module = TwoInputs()
    expected = module(x[:, :2], x[:, 2:]).detach()
    as_tuple, as_dict = (x[:, :2], x[:, 2:]), {"left": x[:, :2], "right": x[:, 2:].numpy()}
    trained = []
    for inputs in (as_tuple, list(as_tuple), as_dict):
        model = make_model(make_strategy(2), copy.deepcopy(module))
        torch.testing.assert_close(model.predict(as_dict, 2), expected)
        torch.testing.assert_close(model.predict(as_tuple, 2), expected)
        torch.manual_seed(0)
        model.fit(inputs, y, 2, verbose=0)
        trained.append(weights(model))
        assert model.evaluate(inputs, y, 3, verbose=0)["loss"] == pytest.approx(
            model.evaluate([({"left": x[:, :2], "right": x[:, 2:]}, y)], verbose=0)["loss"], abs=1e-6
        )
    assert_close(trained[0], trained[1], 1e-6)
    assert_close(trained[0], trained[2], 1e-6)


def test_validation_data_may_be_tuples_of_several_inputs_and_targets(make_strategy: MakeStrategy):
    x, _ = rows(8)
    inputs, targets = (x[:, :2], x[:, 2:]), (x[:, :3], x[:, 1:])
    model = compiled(
        TwoInputs(outputs=2),
        make_strategy(2),
        loss=lambda outputs, y: (outputs[0] - y[0]).square() + (outputs[1] - y[1]).abs(),
    )
    held_out = (tuple(each[:5] for each in inputs), tuple(each[:5] for each in targets))

    history = model.fit(inputs, targets, 4, validation_data=held_out, verbose=0)

    left, right = model.predict(held_out[0], 5)
    expected = ((left - targets[0][:5]).square() + (right - targets[1][:5]).abs()).mean().item()
    assert history.history["val_loss"] == [pytest.approx(expected, abs=1e-6)]


def test_tables_of_pandas_train_as_their_numbers_do(make_strategy: MakeStrategy):
    pandas = pytest.importorskip("pandas")
    x, y = rows()
    frame = pandas.DataFrame(x.double().numpy(), columns=list("abcd"))
    frame["d"] = frame["d"] > 0
    numbers = torch.cat([x[:, :3], (x[:, 3:] > 0).float()], 1)
    model = make_model(make_strategy(2))
    torch.manual_seed(11)

    weight = pandas.Series(torch.ones(22).numpy())
    model.fit(frame, pandas.Series(y.numpy()), 5, 2, sample_weight=weight, validation_data=(frame, y), verbose=0)

    assert_close(weights(model), by_hand(numbers, y), 1e-6)
    torch.testing.assert_close(model.predict(frame), model.predict(numbers))
    torch.testing.assert_close(model(frame[:3]), model(numbers[:3]))
    torch.testing.assert_close(model.predict({"input": frame.convert_dtypes()}), model.predict(numbers))
    with pytest.raises(DataError, match="x has columns that are no numbers: name"):
        model.predict(frame.assign(name="a"))


def test_a_fit_on_arrays_resumes_at_the_sample(make_strategy: MakeStrategy, tmp_path: Path):
    x, y = rows()

    def train(stop_at: int | None, folder: Path) -> Model:
        model = make_model(make_strategy(2))

        def stop(batch: int, logs: Any) -> None:
            if batch == stop_at:
                raise KeyboardInterrupt

        torch.manual_seed(11)
        backup = BackupAndRestore(folder, save_freq=1, delete_checkpoint=False)
        model.fit(x, y, 5, 2, callbacks=[backup, LambdaCallback(on_train_batch_begin=stop)], verbose=0)
        return model

    whole = train(None, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(3, tmp_path / "stopped")
    resumed = train(None, tmp_path / "stopped")

    assert all(map(torch.equal, weights(resumed), weights(whole)))


def test_a_module_in_double_precision_keeps_it(make_strategy: MakeStrategy):
    model = make_model(make_strategy(2), nn.Linear(4, 3).double())
    assert model.predict(np.zeros((5, 4))).dtype is torch.float64


MISTAKES: dict[str, tuple[type[Exception], tuple[str, ...], Any]] = {
    "an old call": (
        ConfigError,
        ("y", "validation_data=", "DataLoader"),
        lambda model, x, y: model.fit(*[DataLoader(TensorDataset(x, y), 5)] * 2),
    ),
    "y beside batches": (ConfigError, ("y", "list"), lambda model, x, y: model.fit([(x, y)], y)),
    "size beside batches": (ConfigError, ("batch_size",), lambda model, x, y: model.fit([(x, y)], batch_size=4)),
    "order beside batches": (ConfigError, ("shuffle",), lambda model, x, y: model.fit([(x, y)], shuffle=True)),
    "split of batches": (
        ConfigError,
        ("validation_split",),
        lambda model, x, y: model.fit([(x, y)], validation_split=0.5),
    ),
    "weights beside batches": (
        ConfigError,
        ("class_weight", "sample_weight"),
        lambda model, x, y: model.fit([(x, y)], class_weight={}, sample_weight=y),
    ),
    "evaluate with both": (ConfigError, ("batch_size",), lambda model, x, y: model.evaluate([(x, y)], batch_size=4)),
    "predict with both": (ConfigError, ("batch_size",), lambda model, x, y: model.predict([x, x], batch_size=4)),
    "targets to validate with": (
        ConfigError,
        ("validation_data", "(x, y)"),
        lambda model, x, y: model.fit([(x, y)], validation_data=y),
    ),
    "lengths": (DataError, ("x has 22", "y has 21"), lambda model, x, y: model.fit(x, y[1:])),
    "lengths in dicts": (
        DataError,
        ('x["b"] has 20', 'x["a"] has 22'),
        lambda model, x, y: model.evaluate({"a": x, "b": x[2:]}, y),
    ),
    "no targets": (DataError, ("y",), lambda model, x, y: model.fit(x)),
    "not an array": (DataError, ("y[0]", "int"), lambda model, x, y: model.fit(x, y.tolist())),
    "words": (DataError, ("y", "dtype"), lambda model, x, y: model.fit(x, np.array(["a"] * 22))),
    "no row": (DataError, ("no rows",), lambda model, x, y: model.fit(x[:0], y[:0])),
    "all to validate with": (
        ConfigError,
        ("validation_split=1.0",),
        lambda model, x, y: model.fit(x, y, validation_split=1.0),
    ),
    "negative split": (ConfigError, ("-0.1",), lambda model, x, y: model.fit(x, y, validation_split=-0.1)),
    "nothing to validate with": (
        ConfigError,
        ("2 rows",),
        lambda model, x, y: model.fit(x[:2], y[:2], validation_split=0.9),
    ),
    "split and data": (
        ConfigError,
        ("validation_split", "validation_data"),
        lambda model, x, y: model.fit(x, y, validation_split=0.5, validation_data=(x, y)),
    ),
    "validation size of batches": (
        ConfigError,
        ("validation_batch_size",),
        lambda model, x, y: model.fit(x, y, validation_data=[(x, y)], validation_batch_size=2),
    ),
    "validation size without validation": (
        ConfigError,
        ("validation_batch_size",),
        lambda model, x, y: model.fit(x, y, validation_batch_size=2),
    ),
    "validation steps without validation": (
        ConfigError,
        ("validation_steps",),
        lambda model, x, y: model.fit(x, y, validation_steps=2),
    ),
    "no validation steps": (
        ConfigError,
        ("validation_steps=0",),
        lambda model, x, y: model.fit(x, y, validation_split=0.5, validation_steps=0),
    ),
    "batch of none": (ConfigError, ("batch_size=0",), lambda model, x, y: model.fit(x, y, 0)),
    "epochs as batches": (ConfigError, ("batch_size=[",), lambda model, x, y: model.fit(x, y, [x])),
    "named classes": (
        ConfigError,
        ("class_weight", "'cat'"),
        lambda model, x, y: model.fit(x, y, class_weight={"cat": 1}),
    ),
    "no classes": (ConfigError, ("class_weight", "(22, 4)"), lambda model, x, y: model.fit(x, x, class_weight={0: 1})),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_what_would_be_misread_is_refused(make_strategy: MakeStrategy, kind: str):
    error, names, call = MISTAKES[kind]
    model = make_model(make_strategy(1))
    with pytest.raises(error) as raised:
        call(model, *rows())
    assert all(name in str(raised.value) for name in names), raised.value
