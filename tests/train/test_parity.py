"""The central promise: Model.fit on 1, 2, 3 and 4 replicas gives the numbers of a hand-written loop on one device.

In float64, so that what is left of a difference is the order of additions: the tolerance is 1e-9 relative to weights
of order 1, while averaging the replicas' means instead of dividing sums once is off by more than 1e-3 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import adamw, assert_close, mlp, sentences, token_losses, token_net, train, vectors, weighted
from tests.train.conftest import MakeStrategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lockstep.train.model import Model

EPOCHS = 2


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)


def falling(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda update: 1 / (1 + update))


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class Case:
    make_module: Callable[[], nn.Module] = mlp
    make_batches: Callable[[], list[Any]] = vectors
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam
    loss: Callable[[Tensor, Tensor], Any] = per_example
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "adam": Case(),
    "adamw": Case(optimizer=adamw),
    "sgd with momentum": Case(optimizer=momentum),
    "scalar mean": Case(loss=mean),
    "sample weights": Case(make_batches=lambda: weighted(vectors())),
    "scheduler": Case(scheduler=falling),
    "clipping": Case(optimizer=momentum, settings={"clip_norm": 0.3}),
    "accumulation": Case(settings={"accumulate": 2}),
    "token weights, tied and unused weights": Case(make_module=token_net, make_batches=sentences, loss=token_losses),
    "all together": Case(
        make_module=token_net,
        make_batches=sentences,
        loss=token_losses,
        optimizer=adamw,
        scheduler=falling,
        settings={"clip_norm": 0.3, "accumulate": 3},
    ),
}


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_replicas_give_the_numbers_of_one_device(name: str, replicas: int, make_strategy: MakeStrategy):
    case = CASES[name]
    module, batches = case.make_module(), case.make_batches()
    alone = train(
        case.make_module(), batches, case.optimizer, case.loss, epochs=EPOCHS, scheduler=case.scheduler, **case.settings
    )
    with make_strategy(replicas).scope():
        model = Model(module)
        model.compile(optimizer=case.optimizer, loss=case.loss, scheduler=case.scheduler, **case.settings)

    history = model.fit(batches, epochs=EPOCHS, verbose=0)

    assert_close(history.history["loss"], alone.epoch_losses(EPOCHS))
    assert_close(module, alone.module)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_the_cases_tell_an_average_of_means_from_the_truth(replicas: int):
    """What the parity tests guard against, shown to be out of their tolerance: the mean of the shards' means."""
    module = mlp()
    x, y = vectors()[0]
    shards = zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True)
    of_means = torch.stack([mean(module(a), b) for a, b in shards]).mean()
    assert (of_means - mean(module(x), y)).abs().item() > 1e-3


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_metrics_and_evaluation_are_those_of_one_device(replicas: int, make_strategy: MakeStrategy):
    metrics = {"accuracy": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3)}
    module = mlp()
    batches = vectors()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = {name: float(metric(module(x), y)) for name, metric in metrics.items()}
    expected["loss"] = mean(module(x), y).item()
    with make_strategy(replicas).scope():
        model = Model(module)
        model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.0), loss=mean, metrics=metrics)

    history = model.fit(batches, validation_data=batches, verbose=0)

    assert model.evaluate(batches, verbose=0) == pytest.approx(expected, rel=1e-6)
    assert {name: values[0] for name, values in history.history.items()} == pytest.approx(
        {**expected, **{f"val_{name}": value for name, value in expected.items()}, "learning_rate": 0.0}, rel=1e-6
    )
