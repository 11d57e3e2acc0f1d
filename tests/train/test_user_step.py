"""A ``train_step`` of the user's, beside the same step in a hand-written loop on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.conftest import MakeStrategy, weights
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lockstep.errors import UsageError
from lockstep.train.model import Model
from lockstep.train.user_step import ShardLoss, TrainStep

ROWS, SIZE = 22, 5


def data() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(ROWS, 4, generator=random), torch.randint(3, (ROWS,), generator=random)
    y[::4] = -100  # so that the shards count differently
    return x, y, torch.rand(ROWS, generator=random)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(4, 3)


def consistency(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets.clamp(min=0), reduction="none") + (
        outputs[0] - outputs[1]
    ).square().mean(1)


class Scaled(Model):
    """Changes its inputs and asks the step above for the rest."""

    def train_step(self, step: TrainStep) -> ShardLoss:
        step.x = step.x * 2
        return super().train_step(step)


class Consistent(Model):
    """Two passes, one with gradients, into one loss."""

    def train_step(self, step: TrainStep) -> ShardLoss:
        with torch.no_grad():
            still = self(step.x)
        return step.loss((step.forward(step.x * 1.5), still), step.y)


class Doubled(Model):
    """Twice as many rows as it was given."""

    def train_step(self, step: TrainStep) -> ShardLoss:
        return step.loss(step.forward(torch.cat([step.x, -step.x])), torch.cat([step.y, step.y]))


def by_hand(loss: Any) -> list[Tensor]:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y, weight = data()
    for part in range(0, ROWS, SIZE):
        rows = slice(part, part + SIZE)
        optimizer.zero_grad()
        loss(module, x[rows], y[rows], weight[rows]).backward()
        optimizer.step()
    return list(module.state_dict().values())


def consistent(module: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return consistency((module(x * 1.5), module(x).detach()), y).mul(weight).mean()


CASES: dict[str, tuple[type[Model], Any, bool, Any]] = {
    "scaled": (Scaled, "cross_entropy", False, lambda module, x, y, _: F.cross_entropy(module(x * 2), y)),
    "consistent": (Consistent, consistency, True, consistent),
    "doubled": (
        Doubled,
        nn.CrossEntropyLoss(reduction="none"),
        False,
        lambda module, x, y, _: F.cross_entropy(module(torch.cat([x, -x])), torch.cat([y, y]), reduction="none").mean(),
    ),
}


def make(strategy: Any, kind: type[Model], loss: Any = "cross_entropy", **settings: Any) -> Model:
    with strategy.scope():
        model = kind(network())
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), loss, **settings)
    return model


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_same_step_on_one_device(make_strategy: MakeStrategy, name: str, replicas: int):
    kind, loss, weighted, step = CASES[name]
    x, y, weight = data()
    model, other = (make(make_strategy(replicas), kind, loss) for _ in range(2))

    history = model.fit(x, y, SIZE, sample_weight=weight if weighted else None, shuffle=False, verbose=0)
    for part in range(0, ROWS, SIZE):
        rows = slice(part, part + SIZE)
        other.train_on_batch(x[rows], y[rows], weight[rows] if weighted else None)

    for own, same, expected in zip(weights(model), weights(other), by_hand(step), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(same, expected, rtol=0, atol=1e-6)
    assert [(timing.steps, timing.examples) for timing in history.timing] == [(5, ROWS)]


def test_metrics_see_the_outputs_that_the_loss_saw(make_strategy: MakeStrategy):
    x, y, _ = data()
    metric = MulticlassAccuracy(3, average="micro", ignore_index=-100)
    model = make(make_strategy(2), Scaled, metrics={"accuracy": metric})
    outputs = network()(x * 2).argmax(1)
    expected = (outputs == y)[y >= 0].float().mean().item()
    assert model.train_on_batch(x, y)["accuracy"] == pytest.approx(expected)


def test_evaluation_is_that_of_the_model(make_strategy: MakeStrategy):
    x, y, _ = data()
    model, plain = make(make_strategy(2), Scaled), make(make_strategy(2), Model)
    assert model.evaluate(x, y, SIZE, verbose=0) == plain.evaluate(x, y, SIZE, verbose=0)


class ScaledTest(Model):
    """Evaluates the mean of two passes, and trains as ever."""

    def test_step(self, step: TrainStep) -> ShardLoss:
        assert not self.module.training
        return step.loss((step.forward(step.x) + step.forward(step.x * 2)) / 2, step.y)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_test_step_evaluates_and_validates(make_strategy: MakeStrategy, replicas: int):
    x, y, weight = data()
    metric = MulticlassAccuracy(3, average="micro", ignore_index=-100)
    model = make(make_strategy(replicas), ScaledTest, metrics={"accuracy": metric})
    plain = make(make_strategy(replicas), Model)

    logs = model.evaluate(x, y, SIZE, sample_weight=weight, verbose=0)
    by_row = F.cross_entropy(network()(x * 1.5), y, reduction="none")
    assert logs["loss"] == pytest.approx((by_row * weight).sum().item() / int((y >= 0).sum()), abs=1e-6)
    assert logs["accuracy"] == pytest.approx(metric(network()(x * 1.5), y).item())
    history = model.fit(x, y, SIZE, shuffle=False, validation_data=(x, y), verbose=0)
    plain.fit(x, y, SIZE, shuffle=False, verbose=0)

    assert all(map(torch.equal, weights(model), weights(plain)))
    expected = F.cross_entropy(F.linear(x * 1.5, *weights(model)), y).item()
    assert history.history["val_loss"] == [pytest.approx(expected, abs=1e-6)]
    assert model.test_on_batch(x, y)["loss"] == pytest.approx(expected, abs=1e-6)


def test_a_test_step_returns_what_the_loss_gave(make_strategy: MakeStrategy):
    x, y, _ = data()
    model = make(make_strategy(2), type("Mine", (Model,), {"test_step": own_loss}))
    with pytest.raises(UsageError, match="returned a Tensor"):
        model.evaluate(x, y, verbose=0)


def as_in_keras(model: Any, step: TrainStep) -> Any:
    x, y = step
    return {"loss": F.cross_entropy(model(x), y)}


def own_loss(model: Any, step: TrainStep) -> Any:
    return F.cross_entropy(step.forward(step.x), step.y)


def own_backward(model: Any, step: TrainStep) -> Any:
    F.cross_entropy(step.forward(step.x), step.y).backward()
    return step.loss(step.forward(step.x), step.y)


def backward_of_loss(model: Any, step: TrainStep) -> Any:
    step.loss(step.forward(step.x), step.y).backward()


def two_losses(model: Any, step: TrainStep) -> Any:
    step.loss(step.forward(step.x), step.y)
    return step.loss(step.forward(step.x), step.y)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (as_in_keras, r"read step\.x, step\.y"),
        (own_loss, r"returned a Tensor.*step\.loss"),
        (own_backward, r"changed the gradients.*strategy\.run"),
        (backward_of_loss, r"return what step\.loss gave"),
        (two_losses, "twice"),
    ],
)
def test_what_would_train_with_other_numbers_is_refused(make_strategy: MakeStrategy, step: Any, words: str):
    x, y, _ = data()
    kind: type[Model] = type("Mine", (Model,), {"train_step": step})
    model = make(make_strategy(2), kind)
    before = weights(model)
    with pytest.raises(UsageError, match=words):
        model.fit(x, y, verbose=0)
    assert all(map(torch.equal, before, weights(model)))
