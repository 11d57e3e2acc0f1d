"""The central promise: Model.fit on 1, 2, 3 and 4 replicas gives the numbers of a hand-written loop on one device.

In float64, so that what is left of a difference is the order of additions: the tolerance is 1e-9 relative to weights
of order 1, while averaging the replicas' means instead of dividing sums once is off by more than 1e-3 here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lockstep.train.model import Model

if TYPE_CHECKING:
    from tests.train.conftest import MakeStrategy

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
EPOCHS = 2
Batch = tuple[Tensor, ...]
# The last global batch has one row: fewer than two, three or four replicas.
SIZES = (7, 7, 6, 5, 1)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)


def falling(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda update: 1 / (1 + update))


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def per_token(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the tokens that are not padding (-100), and how many there are; they differ from row to row."""
    kept = targets != -100
    return F.cross_entropy(outputs[kept], targets[kept], reduction="sum"), kept.sum()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


class Tied(nn.Module):
    """Tokens in, tokens out, over one embedding; with a layer that no loss ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(tokens)))
        return logits


def vectors() -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 5, generator=random, dtype=torch.float64), torch.randint(4, (n,), generator=random))
        for n in SIZES
    ]


def weighted_vectors() -> list[Batch]:
    random = torch.Generator().manual_seed(4)
    return [(x, y, torch.rand(len(x), generator=random, dtype=torch.float64) * 3) for x, y in vectors()]


def sentences() -> list[Batch]:
    random = torch.Generator().manual_seed(5)
    batches = []
    for n in SIZES:
        targets = torch.randint(11, (n, 6), generator=random)
        lengths = torch.randint(1, 7, (n, 1), generator=random)
        targets[torch.arange(6) >= lengths] = -100
        batches.append((torch.randint(11, (n, 6), generator=random), targets))
    return batches


@dataclass(frozen=True, kw_only=True)
class Case:
    make_module: Callable[[], nn.Module] = classifier
    make_batches: Callable[[], list[Batch]] = vectors
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam
    loss: Callable[[Tensor, Tensor], Any] = per_example
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "adam": Case(),
    "adamw": Case(optimizer=adamw),
    "sgd with momentum": Case(optimizer=momentum),
    "scalar mean": Case(loss=mean),
    "sample weights": Case(make_batches=weighted_vectors),
    "scheduler": Case(scheduler=falling),
    "clipping": Case(optimizer=momentum, settings={"clip_norm": 0.3}),
    "accumulation": Case(settings={"accumulate": 2}),
    "token weights, tied and unused weights": Case(make_module=Tied, make_batches=sentences, loss=per_token),
    "all together": Case(
        make_module=Tied,
        make_batches=sentences,
        loss=per_token,
        optimizer=adamw,
        scheduler=falling,
        settings={"clip_norm": 0.3, "accumulate": 3},
    ),
}


def by_hand(module: nn.Module, case: Case, batches: Sequence[Batch]) -> list[float]:
    """The single-device loop: sums over a cycle of global batches, divided once; returns the epochs' mean losses."""
    optimizer = case.optimizer(module.parameters())
    scheduler = None if case.scheduler is None else case.scheduler(optimizer)
    accumulate, clip_norm = case.settings.get("accumulate", 1), case.settings.get("clip_norm")
    epochs = []
    for _ in range(EPOCHS):
        sums = [0.0, 0.0]
        for start in range(0, len(batches), accumulate):
            totals, counts = zip(*(sums_of(module, case, b) for b in batches[start : start + accumulate]), strict=True)
            optimizer.zero_grad()
            (sum(totals) / sum(counts)).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            sums = [sums[0] + float(sum(totals).detach()), sums[1] + float(sum(counts))]
        epochs.append(sums[0] / sums[1])
    return epochs


def sums_of(module: nn.Module, case: Case, batch: Batch) -> tuple[Tensor, float]:
    x, y, *weight = batch
    returned = case.loss(module(x), y)
    if isinstance(returned, tuple):
        return returned[0], float(returned[1])
    if returned.dim() == 0:
        return returned * len(x), float(len(x))
    return (returned * weight[0]).sum() if weight else returned.sum(), float(len(x))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_replicas_give_the_numbers_of_one_device(name: str, replicas: int, make_strategy: MakeStrategy):
    case = CASES[name]
    torch.manual_seed(0)
    alone = case.make_module().double()
    mirrored = copy.deepcopy(alone)
    batches = case.make_batches()

    losses = by_hand(alone, case, batches)
    with make_strategy(replicas).scope():
        model = Model(mirrored)
        model.compile(optimizer=case.optimizer, loss=case.loss, scheduler=case.scheduler, **case.settings)
    history = model.fit(batches, epochs=EPOCHS, verbose=0)

    torch.testing.assert_close(history.history["loss"], losses, **TOLERANCE)
    expected = alone.state_dict()
    for key, value in mirrored.state_dict().items():
        torch.testing.assert_close(value, expected[key], **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_the_cases_tell_an_average_of_means_from_the_truth(replicas: int):
    """What the parity tests guard against, shown to be out of their tolerance: the mean of the shards' means."""
    torch.manual_seed(0)
    module = classifier().double()
    x, y = vectors()[0]
    shards = zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True)

    of_means = torch.stack([mean(module(a), b) for a, b in shards]).mean()

    assert (of_means - mean(module(x), y)).abs().item() > 1e-3


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_metrics_and_evaluation_are_those_of_one_device(replicas: int, make_strategy: MakeStrategy):
    metrics = {"accuracy": MulticlassAccuracy(4, average="micro"), "f1": MulticlassF1Score(4)}
    torch.manual_seed(0)
    module = classifier().double()
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
