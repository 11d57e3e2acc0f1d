"""Losses, optimizers and metrics by name, and on outputs with logits, beside a plain loop on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.conftest import MakeStrategy, compiled, weights
from torch import Tensor, nn
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassF1Score

from lockstep.errors import ConfigError, LockstepError
from lockstep.train.classification import Accuracy
from lockstep.train.model import Model

ROWS = 11


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def labels(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(4))


def padded(targets: Tensor) -> Tensor:
    targets[:3, 1:] = -100
    return targets


def network(outputs: int, *last: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, outputs), *last)


def tokens(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction=reduction)


CASES: dict[str, tuple[str, nn.Module, Tensor, Tensor, Any]] = {
    "regression": ("mse", network(2), inputs(ROWS, 4), inputs(ROWS, 2), F.mse_loss),
    "one output": (
        "mae",
        network(1),
        inputs(ROWS, 4),
        labels(9, ROWS),
        lambda outputs, targets, **settings: F.l1_loss(outputs[:, 0], targets.float(), **settings),
    ),
    "huber": ("huber", network(2), inputs(ROWS, 4), inputs(ROWS, 2), F.huber_loss),
    "classes": ("cross_entropy", network(3), inputs(ROWS, 4), labels(3, ROWS).int(), None),
    "columns of classes": ("cross_entropy", network(3), inputs(ROWS, 4), labels(3, ROWS, 1), None),
    "probabilities": ("cross_entropy", network(3), inputs(ROWS, 4), inputs(ROWS, 3).softmax(1), F.cross_entropy),
    "tokens, some ignored": ("cross_entropy", network(3), inputs(ROWS, 5, 4), padded(labels(3, ROWS, 5)), tokens),
    "pixels": (
        "nll",
        network(6, nn.Unflatten(1, (3, 2)), nn.LogSoftmax(1)),
        inputs(ROWS, 4),
        labels(3, ROWS, 2),
        F.nll_loss,
    ),
    "yes or no": (
        "binary_cross_entropy_with_logits",
        network(1),
        inputs(ROWS, 4),
        labels(2, ROWS),
        lambda outputs, targets, **settings: F.binary_cross_entropy_with_logits(
            outputs[:, 0], targets.float(), **settings
        ),
    ),
    "several probabilities": (
        "binary_cross_entropy",
        network(3, nn.Sigmoid()),
        inputs(ROWS, 4),
        labels(2, ROWS, 3).float(),
        F.binary_cross_entropy,
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_a_loss_by_name_trains_as_torchs_own(make_strategy: MakeStrategy, kind: str, weighted: bool):
    name, module, x, y, by_hand = CASES[kind]
    plain = network(module[0].out_features, *module[1:])  # type: ignore[index, arg-type, misc]  # a Sequential
    weight = torch.linspace(0.5, 2.0, ROWS)
    with make_strategy(3).scope():
        model = Model(network(module[0].out_features, *module[1:]))  # type: ignore[index, arg-type, misc]
        model.compile("adamw", name)

    history = model.fit(x, y, 4, 2, sample_weight=weight if weighted else None, shuffle=False, verbose=0)

    optimizer = torch.optim.AdamW(plain.parameters())
    by_hand = by_hand or (
        lambda outputs, targets, **settings: F.cross_entropy(outputs, targets.flatten().long(), **settings)
    )
    for _ in range(2):
        for part in range(0, ROWS, 4):
            outputs, targets, factors = plain(x[part : part + 4]), y[part : part + 4], weight[part : part + 4]
            loss = by_hand(outputs, targets)
            if weighted:
                losses = by_hand(outputs, targets, reduction="none")
                count = (targets != -100).sum() if "token" in kind else losses.numel()
                loss = (losses * factors.reshape(-1, *[1] * (losses.dim() - 1))).sum() / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for own, expected in zip(weights(model), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert history.history["loss"][1] < history.history["loss"][0]


ACCURACIES: dict[str, tuple[Any, Tensor, Tensor, float]] = {
    "classes": ("cross_entropy", torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 1, 1]), 2 / 3),
    "one-hot": (nn.CrossEntropyLoss(), torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 1 / 2),
    "tokens": (
        F.cross_entropy,
        torch.eye(3)[:2].repeat(2, 1, 1),
        torch.tensor([[0, 2], [-100, 1]]),
        2 / 3,
    ),
    "logits": (
        "binary_cross_entropy_with_logits",
        torch.tensor([[0.1], [0.9], [-2.0]]),
        torch.tensor([0, 1, 0]),
        2 / 3,
    ),
    "probabilities": (nn.BCELoss(), torch.tensor([[0.1, 0.9]]), torch.tensor([[0.0, 0.0]]), 1 / 2),
}


@pytest.mark.parametrize("kind", ACCURACIES)
def test_accuracy_knows_its_outputs_by_the_loss_and_the_shapes(make_strategy: MakeStrategy, kind: str):
    loss, outputs, targets, expected = ACCURACIES[kind]
    model = compiled(nn.Linear(2, 2), make_strategy(2), optimizer=None, loss=loss, metrics=["accuracy"])
    metric = model.metrics["accuracy"]
    metric.update(outputs, targets)
    assert metric.compute() == pytest.approx(expected)


# Scores by hand: 2 * found / (decided + meant) of each class, and their mean.
F1_SCORES: dict[str, tuple[str, Tensor, Tensor, float]] = {
    "classes": ("cross_entropy", torch.eye(3)[[0, 0, 1, 1, 2, 0]], torch.tensor([0, 0, 0, 1, 2, 2]), 2 / 3),
    "a class that is not there": ("cross_entropy", torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1]), 4 / 9),
    "one-hot": ("cross_entropy", torch.eye(2)[[0, 1, 1, 1]], torch.eye(2)[[0, 1, 1, 0]], (2 / 3 + 4 / 5) / 2),
    "tokens, some ignored": (
        "cross_entropy",
        torch.eye(3)[torch.tensor([[0, 1], [2, 0]])],
        torch.tensor([[0, 1], [2, -100]]),
        1.0,
    ),
    "logits": (
        "binary_cross_entropy_with_logits",
        torch.tensor([[0.1], [0.9], [-2.0]]),
        torch.tensor([0, 1, 1]),
        1 / 2,
    ),
    "labels": (
        "binary_cross_entropy",
        torch.tensor([[0.9, 0.1], [0.2, 0.7], [0.6, 0.6]]),
        torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]),
        (4 / 5 + 1 / 2) / 2,
    ),
}


@pytest.mark.parametrize("kind", F1_SCORES)
def test_f1_is_the_mean_over_classes_or_that_of_yes_whatever_the_shards(make_strategy: MakeStrategy, kind: str):
    loss, outputs, targets, expected = F1_SCORES[kind]
    model = compiled(nn.Identity(), make_strategy(4), optimizer=None, loss=loss, metrics=["f1"])
    assert model.evaluate(outputs, targets, len(outputs) - 1, verbose=0)["f1"] == pytest.approx(expected)


def test_metrics_are_a_list_of_names_and_metrics(make_strategy: MakeStrategy):
    x, y = inputs(ROWS, 4), labels(3, ROWS)
    model = compiled(network(3), make_strategy(3), "sgd", "cross_entropy", metrics=["accuracy", MulticlassF1Score(3)])

    result = model.evaluate(x, y, 4, verbose=0)

    outputs = network(3)(x)
    assert result == {
        "loss": pytest.approx(F.cross_entropy(outputs, y).item(), abs=1e-6),
        "accuracy": pytest.approx((outputs.argmax(1) == y).float().mean().item()),
        "multiclass_f1_score": pytest.approx(MulticlassF1Score(3)(outputs, y).item()),
    }
    model.compile(loss="mse", metrics={"error": "rmse"})
    assert model.evaluate(x, inputs(ROWS, 3), verbose=0)["error"] == pytest.approx(
        F.mse_loss(outputs, inputs(ROWS, 3)).sqrt().item(), abs=1e-5
    )


@dataclasses.dataclass
class Outputs(dict[str, Any]):
    """As transformers has them: a dict with attributes."""

    logits: Tensor
    cache: object

    def __post_init__(self) -> None:
        self.update(logits=self.logits, cache=self.cache)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(self.head(x), None)


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy])
def test_losses_and_metrics_take_the_logits_of_outputs(make_strategy: MakeStrategy, loss: Any):
    x, y = inputs(ROWS, 4), labels(3, ROWS)
    model = compiled(
        WithLogits(), make_strategy(2), "sgd", loss, metrics=["accuracy", MulticlassAccuracy(3, average="micro")]
    )
    outputs = WithLogits().head(x)
    accuracy = (outputs.argmax(1) == y).float().mean().item()
    expected = {"accuracy": pytest.approx(accuracy), "multiclass_accuracy": pytest.approx(accuracy)}
    expected["loss"] = pytest.approx(F.cross_entropy(outputs, y).item(), abs=1e-6)
    assert model.train_on_batch(x, y) == expected


@pytest.mark.filterwarnings("ignore:the loss")  # which changes what it has captured
def test_your_own_loss_gets_all_outputs(make_strategy: MakeStrategy):
    seen: list[type] = []

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        seen.append(type(outputs))
        return F.cross_entropy(outputs.logits, targets, reduction="none")

    model = compiled(WithLogits(), make_strategy(2), "sgd", loss)
    model.train_on_batch(inputs(ROWS, 4), labels(3, ROWS))
    assert Outputs in seen
    assert Tensor not in seen


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"loss": "crossentropy"}, ("'crossentropy'", "'cross_entropy'", "'mse'")),
        ({"loss": "mse", "optimizer": "adamax2"}, ("'adamax2'", "'adam'", "'sgd'")),
        ({"loss": "mse", "metrics": ["auc"]}, ("'auc'", "'f1'", "'accuracy'", "'mae'")),
        ({"loss": "mse", "metrics": "accuracy"}, ("['accuracy']",)),
        ({"loss": "mse", "metrics": [BinaryF1Score(), BinaryF1Score()]}, ("binary_f1_score", "dict")),
    ],
)
def test_an_unknown_name_gets_a_line_that_lists_the_known(
    make_strategy: MakeStrategy, settings: dict[str, Any], names: tuple[str, ...]
):
    with make_strategy(1).scope():
        model = Model(network(3))
    with pytest.raises(ConfigError) as raised:
        model.compile(**settings)
    assert all(name in str(raised.value) for name in names)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        ("mse", (4, 3), torch.zeros(4)),
        ("mse", (4, 3), torch.zeros(4, 1)),
        ("cross_entropy", (4, 3), torch.zeros(4, 2, dtype=torch.long)),
        ("cross_entropy", (4, 3), torch.zeros(4)),
        ("cross_entropy", (4, 3, 3), torch.zeros(4, 3, dtype=torch.long)),  # either of the two could be the classes
        ("binary_cross_entropy_with_logits", (4, 2), torch.zeros(4)),
    ],
)
def test_shapes_that_torch_would_broadcast_are_refused(
    make_strategy: MakeStrategy, loss: str, outputs: tuple[int, ...], targets: Tensor
):
    model = compiled(nn.Identity(), make_strategy(1), optimizer=None, loss=loss)
    with pytest.raises(LockstepError, match="shape"):
        model.test_on_batch(torch.zeros(outputs), targets)


def test_accuracy_of_unknown_outputs_is_refused():
    with pytest.raises(ConfigError, match="BinaryAccuracy"):
        Accuracy().update(torch.zeros(4), torch.zeros(4))
