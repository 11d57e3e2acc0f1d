"""Trainings on a stand-in GPU, with and without recorded steps, and the same by hand on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.stand_in import StandInDriver, stand_in_gpus
from torch import Tensor, nn

from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.callbacks.base import Callback
from lockstep.train.logs import History
from lockstep.train.model import Model

Batches = list[tuple[Tensor, ...]]


class Net(nn.Module):
    """Sixteen numbers to three classes: shards then begin at addresses like those of copies, and MKL rounds by them."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.outer = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.drop(torch.tanh(self.norm(self.inner(x)))))
        return out


def batches(rows: int = 32, size: int = 8, *, weights: bool = False) -> Batches:
    """Global batches of ``size`` rows; the last is short where they do not divide."""
    random = torch.Generator().manual_seed(5)
    columns = [torch.randn(rows, 16, generator=random), torch.randint(0, 3, (rows,), generator=random)]
    if weights:
        columns.append(torch.rand(rows, generator=random))
    return list(zip(*(column.split(size) for column in columns), strict=True))


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that changes every second update, to numbers that float32 holds exactly, as recorded steps read them."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 ** -(step // 2))


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 2**-5)


@dataclass
class Trained:
    """What came of a training."""

    weights: dict[str, Tensor]
    history: History
    driver: StandInDriver
    reasons: list[str] = field(default_factory=list)

    @property
    def replays(self) -> list[int]:
        """How often each recording was replayed."""
        return [graph.replays for graph in self.driver.graphs]


Train = Callable[..., Trained]


@pytest.fixture
def train(caplog: pytest.LogCaptureFixture, one_core: None) -> Train:
    """Trains ``module`` on a stand-in GPU of ``shares``.

    With one thread: a stand-in graph is replayed by the caller, who else would add up with more threads than replicas.
    """

    def run(
        module: nn.Module,
        data: Iterable[Any],
        *,
        shares: Sequence[int] | None = (2048, 2048),
        epochs: int = 2,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
        callbacks: Sequence[Callback] = (),
        sync_batchnorm: bool = False,
        **compiled: Any,
    ) -> Trained:
        caplog.clear()
        caplog.set_level("INFO", logger="lockstep")
        module = copy.deepcopy(module)
        with stand_in_gpus(shares) as (devices, driver), closing(MirroredStrategy(devices, seed=7)) as strategy:
            with strategy.scope():
                model = Model(module, sync_batchnorm=sync_batchnorm)
            settings = {"loss": nn.CrossEntropyLoss(reduction="none")} | compiled
            model.compile(optimizer=optimizer(module.parameters()), **settings)
            history = model.fit(data, epochs=epochs, callbacks=list(callbacks), verbose=0)
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        marker = "no CUDA graphs of whole steps: "
        told = [record.getMessage() for record in caplog.records]
        return Trained(weights, history, driver, [text.removeprefix(marker) for text in told if marker in text])

    return run


@pytest.fixture
def net() -> Net:
    """Without anything random."""
    torch.manual_seed(0)
    return Net()


def alike(first: Trained, second: Trained) -> bool:
    """Whether two trainings came out bit for bit alike."""
    same = all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    return same and first.history.history == second.history.history
