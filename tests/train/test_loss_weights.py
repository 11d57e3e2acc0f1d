"""Losses with weights of their own, as of metric learning: trained as in the plain loop, or refused by compile."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from tests.oracle import assert_close, train, vectors
from tests.train.conftest import MakeStrategy, compiled
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.train.model import Model


class Angles(nn.Module):
    """Cross-entropy of the angles between an example and each class's centre."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.criterion = nn.CrossEntropyLoss(torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=torch.float64))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        scores = F.normalize(outputs, dim=1) @ F.normalize(self.centres, dim=1).T
        return self.criterion(scores * 4, target)


def parts() -> tuple[nn.Module, Angles]:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double(), Angles()


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(chain.from_iterable(module.parameters() for module in modules), 0.5)


def batches() -> list[tuple[Tensor, Tensor]]:
    return vectors((7, 5, 1), inputs=5, classes=4)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_mirrored_loss_is_trained_as_in_the_plain_loop(replicas: int, make_strategy: MakeStrategy):
    module, loss = parts()
    alone, criterion = copy.deepcopy(module), copy.deepcopy(loss)
    optimizer = sgd(alone, criterion)
    for x, y in batches():
        optimizer.zero_grad()
        criterion(alone(x), y).backward()
        optimizer.step()

    strategy = make_strategy(replicas)
    with strategy.scope():
        model = Model(module)
        mirrored = strategy.mirror(loss)
        model.compile(optimizer=sgd(module, loss), loss=mirrored)
    model.fit(batches(), verbose=0)

    assert_close(module, alone)
    assert_close(loss, criterion)


@pytest.mark.parametrize("given", ["module", "partial", "method"])
def test_a_plain_loss_with_weights_is_refused(given: str, make_strategy: MakeStrategy):
    module, loss = parts()
    as_given: dict[str, Any] = {"module": loss, "partial": partial(loss), "method": loss.forward}
    with make_strategy(2).scope():
        model = Model(module)
        with pytest.raises(
            UsageError, match=r"the loss .*'centres'.*strategy\.mirror\(loss\).*requires_grad_\(False\)"
        ):
            model.compile(optimizer=sgd(module, loss), loss=as_given[given])
        with pytest.raises(UsageError, match=r"the loss .*'centres'"):
            model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.5), loss=as_given[given])


def test_a_mirrored_loss_that_nothing_trains_is_refused(make_strategy: MakeStrategy):
    module, loss = parts()
    strategy = make_strategy(2)
    with strategy.scope():
        model = Model(module)
        with pytest.raises(UsageError, match=r"the loss .*does not hold, such as 'centres'"):
            model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.5), loss=strategy.mirror(loss))


@pytest.mark.parametrize("replicas", [1, 3])
def test_weights_that_are_not_trained_are_no_matter(replicas: int, make_strategy: MakeStrategy):
    module, loss = parts()
    loss.requires_grad_(False)
    alone = train(copy.deepcopy(module), batches(), loss=loss).module
    compiled(module, make_strategy(replicas), oracle.sgd, loss).fit(batches(), verbose=0)
    assert_close(module, alone)


def test_a_loss_with_weights_can_be_evaluated(make_strategy: MakeStrategy):
    module, loss = parts()
    x, y = batches()[0]
    expected = float(loss(module(x), y).detach())
    model = compiled(module, make_strategy(2), None, loss)
    assert model.evaluate([(x, y)], verbose=0)["loss"] == pytest.approx(expected, rel=1e-9)
