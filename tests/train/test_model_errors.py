from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_close, mlp, sgd, train, vectors
from tests.train.conftest import MakeStrategy, compiled, equal, weights
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep.errors import CallbackError, ConfigError, DataError, NonFiniteLossError, UsageError
from lockstep.train.callbacks import LambdaCallback
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def test_nan_names_epoch_and_step_and_keeps_the_last_good_weights(make_strategy: MakeStrategy, batches: Batches):
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    model, good = compiled(copy.deepcopy(module), make_strategy(2)), compiled(module, make_strategy(2))
    poisoned = [*batches[:2], (batches[2][0] * float("nan"), batches[2][1])]
    with pytest.raises(NonFiniteLossError, match=r"^epoch 1, step 3: the loss is nan; the weights are those before"):
        model.fit(poisoned, epochs=2, verbose=0)
    good.fit(batches[:2], verbose=0)
    assert equal(weights(model), weights(good))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_nan_in_the_data_is_said_to_be_there(make_strategy: MakeStrategy, batches: Batches, replicas: int):
    x, y = batches[1][0].clone(), batches[1][1]
    x[2, 1] = float("nan")
    model = compiled(nn.Linear(3, 1), make_strategy(replicas))
    with pytest.raises(
        NonFiniteLossError, match=r"^epoch 1, step 2: .*; .* x of this step's batch .*, first in row 2;"
    ):
        model.fit([batches[0], (x, y)], verbose=0)


def test_nan_is_found_in_a_cycle_that_the_epoch_cuts_short(make_strategy: MakeStrategy, batches: Batches):
    model = compiled(nn.Linear(3, 1), make_strategy(2), accumulate=4)
    before = weights(model)
    with pytest.raises(NonFiniteLossError, match="epoch 1, step 3: the loss is inf"):
        model.fit([*batches[:2], (batches[2][0], batches[2][1] * float("inf"))], verbose=0)
    assert equal(weights(model), before)


def stop_at_first_batch(error: BaseException) -> LambdaCallback:
    def stop(batch: int, logs: Any) -> None:
        raise error

    return LambdaCallback(on_train_batch_end=stop)


def test_a_run_that_was_stopped_leaves_nothing_to_the_next(make_strategy: MakeStrategy, batches: Batches):
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    stopped = compiled(copy.deepcopy(module), make_strategy(2), accumulate=2)
    fresh = compiled(module, make_strategy(2), accumulate=2)

    with pytest.raises(KeyboardInterrupt):
        stopped.fit(batches, callbacks=[stop_at_first_batch(KeyboardInterrupt())], verbose=0)
    stopped.fit(batches, verbose=0)
    fresh.fit(batches, verbose=0)

    assert equal(weights(stopped), weights(fresh))


def test_a_callback_that_raises_is_named(model: Model, batches: Batches):
    with pytest.raises(CallbackError, match=r"callback LambdaCallback\.on_train_batch_end raised ValueError: no"):
        model.fit(batches, callbacks=[stop_at_first_batch(ValueError("no"))], verbose=0)


def test_stop_training_ends_after_the_batch(model: Model, batches: Batches):
    def stop(batch: int, logs: Any) -> None:
        model.stop_training = batch == 1

    history = model.fit(batches, epochs=5, callbacks=[LambdaCallback(on_train_batch_end=stop)], verbose=0)

    assert [timing.steps for timing in history.timing] == [2]


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_empty_dataset_is_one_line(model: Model, batches: Batches, call: str):
    with pytest.raises(DataError, match="gave no batches; give a DataLoader or a list with at least one batch"):
        getattr(model, call)([], verbose=0)
    with pytest.raises(DataError, match="the validation data gave no batches"):
        model.fit(batches, validation_data=[], verbose=0)


def test_a_generator_that_is_read_already_is_named(model: Model, batches: Batches):
    def once() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches

    with pytest.raises(DataError, match=r"the training data .*epoch 2.*generator"):
        model.fit(once(), epochs=2, verbose=0)


def test_a_loss_of_the_wrong_shape_names_the_shape_and_the_rows(make_strategy: MakeStrategy, batches: Batches):
    model = compiled(nn.Linear(3, 1), make_strategy(2), loss=lambda outputs, targets: outputs.flatten()[:1])
    with pytest.raises(ConfigError, match=r"the loss returned shape \(1,\) for 2 examples"):
        model.fit(batches, verbose=0)


def test_fit_before_compile_says_so(make_strategy: MakeStrategy, batches: Batches):
    with make_strategy(1).scope():
        model = Model(nn.Linear(3, 1))
    with pytest.raises(UsageError, match=r"fit was called before compile; call model\.compile"):
        model.fit(batches)
    model.compile(loss=nn.functional.mse_loss)
    with pytest.raises(UsageError, match="fit needs an optimizer"):
        model.fit(batches)


def test_bad_arguments_of_fit_are_refused(model: Model, batches: Batches):
    with pytest.raises(ConfigError, match="verbose=3 is unknown; choose 0"):
        model.fit(batches, verbose=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps_per_epoch=0 was given, expected at least 1"):
        model.fit(batches, steps_per_epoch=0)
    with pytest.raises(ConfigError, match="callbacks is a LambdaCallback; give a list"):
        model.fit(batches, callbacks=LambdaCallback())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("epochs", 0, 1), ("epochs", 1.5, 1), ("epochs", "2", 1), ("initial_epoch", -1, 0), ("validation_freq", 0, 1)],
)
def test_impossible_numbers_of_epochs_are_refused(model: Model, batches: Batches, name: str, value: Any, least: int):
    with pytest.raises(ConfigError, match=f"{name}={value!r} was given, expected .*at least {least}"):
        model.fit(batches, **{name: value})


@pytest.mark.parametrize("detach", [torch.Tensor.detach, torch.ones_like], ids=["detached", "constant"])
def test_a_loss_without_a_gradient_is_named(make_strategy: MakeStrategy, batches: Batches, detach: Any):
    model = compiled(nn.Linear(3, 1), make_strategy(2), loss=lambda outputs, targets: detach(outputs))
    with pytest.raises(ConfigError, match="the loss depends on no trained parameter; compute it from the module's"):
        model.fit(batches, verbose=0)


def test_validation_data_that_is_a_generator_is_named(model: Model, batches: Batches):
    once = (batch for batch in batches)
    with pytest.raises(DataError, match="the validation data gave no batches: a generator can be read only once"):
        model.fit(batches, validation_data=once, epochs=2, verbose=0)


def test_a_model_of_something_else_is_refused(make_strategy: MakeStrategy):
    with make_strategy(1).scope(), pytest.raises(ConfigError, match=r"Model got a function; give a torch\.nn\.Module"):
        Model(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 4])
def test_data_in_which_nothing_is_counted_is_an_error(rows: int):
    def nothing(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs * 0).sum(), 0

    model = Model(nn.Linear(3, 1))
    model.compile(optimizer=torch.optim.SGD(model.module.parameters(), 0.1), loss=nothing)
    data = [(torch.zeros(rows, 3), torch.zeros(rows, 1))]

    for run in (lambda: model.fit(data, verbose=0), lambda: model.evaluate(data, verbose=0)):
        with pytest.raises(DataError, match="the loss counted nothing over the whole data"):
            run()


def test_a_metric_that_raises_is_named(make_strategy: MakeStrategy, batches: Batches):
    model = compiled(nn.Linear(3, 1), make_strategy(2), metrics={"share": MulticlassAccuracy(4)})
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model.fit(batches, verbose=0)
    assert "metric 'share', updated with (outputs, targets)" in caught.value.__notes__


@pytest.mark.parametrize("as_function", [False, True])
def test_an_optimizer_of_another_network_is_refused(make_strategy: MakeStrategy, batches: Batches, as_function: bool):
    """As a notebook's cell leaves it that makes the network anew: the old optimizer's network is mirrored still."""
    with make_strategy(2).scope():
        first = Model(nn.Linear(3, 1))
        old = torch.optim.SGD(first.module.parameters(), 0.1)
        first.compile(optimizer=old, loss=nn.functional.mse_loss)
        second = Model(nn.Sequential(nn.Linear(3, 1)))
        for optimizer in (old, first.optimizer):
            with pytest.raises(UsageError, match=r"2 parameters that are not the model's.*'weight'.*another Linear"):
                second.compile(optimizer=(lambda _, own=optimizer: own) if as_function else optimizer, loss=torch.sub)


def test_an_optimizer_with_parameters_of_another_network_beside_its_own_is_refused(make_strategy: MakeStrategy):
    backbone = nn.Linear(3, 4)
    with make_strategy(2).scope():
        first = Model(nn.Sequential(backbone, nn.Linear(4, 1)))
        old = torch.optim.SGD(first.module.parameters(), 0.1)
        second = Model(nn.Sequential(backbone, nn.Linear(4, 1)))
        with pytest.raises(UsageError, match=r"2 parameters.*'1\.weight' of another Sequential"):
            second.compile(optimizer=old, loss=nn.functional.mse_loss)


def test_an_optimizer_over_a_part_of_the_network_trains_that(make_strategy: MakeStrategy):
    module, plain = mlp(), mlp()
    model = compiled(module, make_strategy(2), sgd(module[2].parameters()), nn.functional.cross_entropy)
    model.fit(vectors(), verbose=0)
    assert_close(module, train(plain, vectors(), lambda _: sgd(plain[2].parameters())).module)


class OwnLoss:
    def compute_loss(self, *_: Any) -> None: ...


@pytest.mark.parametrize("name", ["training_step", "predict_step", "compute_loss", "forward"])
def test_steps_in_a_subclass_are_refused_when_it_is_defined(name: str):
    with pytest.raises(UsageError, match=f"class Distiller defines {name}"):
        type("Distiller", (Model,), {name: lambda self, batch: None})


def test_steps_of_a_mixin_or_set_on_an_object_are_refused_too(model: Model):
    with pytest.raises(UsageError, match=r"class Mixed defines compute_loss.*strategy\.run"):
        type("Mixed", (OwnLoss, Model), {})
    with pytest.raises(UsageError, match="train_step"):
        model.train_step = lambda batch: None  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(UsageError, match="test_step"):
        model.test_step = lambda batch: None  # type: ignore[method-assign, assignment, misc]


def test_a_subclass_with_other_methods_trains(make_strategy: MakeStrategy, batches: Batches):
    class Named(Model):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.name = "mine"

        def last_loss(self) -> float:
            return self.history.history["loss"][-1]

    with make_strategy(2).scope():
        model = Named(nn.Linear(3, 1))
        model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.functional.mse_loss)
    model.fit(batches, verbose=0)

    assert model.last_loss() > 0


ROWS = TensorDataset(torch.zeros(8, 3), torch.zeros(8, 1))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return ROWS[row]


class Batches8(Rows):
    """Says how it is iterated, so its batches are its own."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield ROWS[0:8]


@pytest.mark.parametrize("data", [ROWS, Subset(ROWS, [0, 1]), ConcatDataset([ROWS, ROWS]), Rows()])
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_dataset_of_rows_is_refused_with_the_loader_that_makes_batches(model: Model, call: str, data: Any):
    with pytest.raises(DataError, match=f"{type(data).__name__}.*DataLoader"):
        getattr(model, call)(data, verbose=0)
    with pytest.raises(DataError, match=f"{type(data).__name__}.*DataLoader"):
        model.strategy.distribute_dataset(data)
    with pytest.raises(DataError, match="DataLoader"):
        model.fit([ROWS[0:8]], validation_data=data, verbose=0)


@pytest.mark.parametrize("data", [ROWS.tensors[0], ROWS.tensors[0].numpy()])
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_an_array_without_targets_is_refused(model: Model, call: str, data: Any):
    with pytest.raises(DataError, match=rf"{call} got a {type(data).__name__} .*give y.*\(x, y\)"):
        getattr(model, call)(data, verbose=0)


@pytest.mark.parametrize("data", [[ROWS[0:8]], DataLoader(ROWS, 4), DataLoader(Rows(), 4), Batches8()])
def test_what_gives_batches_is_taken(model: Model, data: Any):
    assert model.fit(data, verbose=0).epoch == [0]
