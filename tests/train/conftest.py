"""Strategies over logical devices of the CPU, and a small model to train on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import LogicalDevice
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.model import Model

MakeStrategy = Callable[..., MirroredStrategy]


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


def compiled(
    module: nn.Module, strategy: Any, optimizer: Any = slow_sgd, loss: Any = nn.functional.mse_loss, **settings: Any
) -> Model:
    with strategy.scope():
        model = Model(module)
        model.compile(optimizer=optimizer, loss=loss, **settings)
    return model


def weights(model: Model) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def make_strategy(split_cpu: Callable[[int], tuple[LogicalDevice, ...]]) -> Iterator[MakeStrategy]:
    """A function that makes a strategy of ``replicas`` replicas; all are closed after the test."""
    with ExitStack() as stack:

        def make(replicas: int, *, seed: int | None = None) -> MirroredStrategy:
            devices = split_cpu(4)[:replicas]
            return stack.enter_context(closing(MirroredStrategy(devices, seed=seed)))

        yield make


@pytest.fixture
def model(make_strategy: MakeStrategy) -> Model:
    """A compiled linear model on two replicas."""
    torch.manual_seed(0)
    return compiled(nn.Linear(3, 1), make_strategy(2))


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    """Three global batches of linear data, the last one short."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(10, 3, generator=random)
    y = x.sum(1, keepdim=True)
    return list(zip(x.split(4), y.split(4), strict=True))
