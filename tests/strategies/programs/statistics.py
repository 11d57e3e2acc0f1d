"""Pipelines of modules that keep something of their rows, and losses that read weights; and the same by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "group norm": lambda: nn.GroupNorm(2, 6),
}
WHOLE = {"schedule": "gpipe", "microbatches": 1}


def net(kind: str = "group norm") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), KINDS[kind](), nn.Tanh(), nn.Linear(6, 2)]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=random).double(), torch.randn(8, 2, generator=random).double())] * 3


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def sgd(parameters: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, **settings)


def one_device(kind: str, **settings: Any) -> dict[str, Tensor]:
    module = net(kind)
    optimizer = sgd(module.parameters(), **settings)
    for x, y in batches():
        optimizer.zero_grad()
        loss(module(x), y).mean().backward()
        optimizer.step()
    return module.state_dict()


def train_kinds(kinds: Iterable[str]) -> dict[str, list[tuple[bool, bool]]]:
    """By kind and schedule, for both workers: whether it has warned, and has the weights of one device."""
    torch.set_num_threads(1)
    found = {}
    for kind in kinds:
        for settings in ({}, WHOLE):
            strategy = ls.ParallelStrategy(seed=0, pipeline=2, **settings)
            with strategy.scope(), warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                model = ls.Model(strategy.parallelize(net(kind), pipeline_split=["4"]))
                model.compile(sgd, loss)
                model.fit(batches(), verbose=0)
                weights = model.state_dict()
            expected = one_device(kind)
            alike = all(torch.allclose(weights[name], expected[name], rtol=1e-9, atol=1e-12) for name in expected)
            seen = any("microbatches=1" in str(each.message) for each in warned)
            name = f"{kind}, whole" if settings else kind
            found[name] = all_gather_object(strategy.workers.processes, "what was seen", (seen, alike))
            strategy.close()
    return found


def penalty(parameters: Iterable[Tensor]) -> Tensor:
    return 0.1 * sum((each.square().sum() for each in parameters), torch.zeros(()))


def fit_with_penalty(grid: dict[str, Any], *, plain: bool = False) -> None:
    """Its loss reads the parameters of the model, or of the module that the user has made."""
    torch.set_num_threads(1)
    strategy, module = ls.ParallelStrategy(seed=0, **grid), net()
    with strategy.scope():
        model = ls.Model(strategy.parallelize(module, tensor_plan=PLAN))
        read = module if plain else model.module
        model.compile(sgd, lambda outputs, targets: loss(outputs, targets).mean() + penalty(read.parameters()))
        model.fit(batches(), verbose=0)


def loop_with_penalty(grid: dict[str, Any], *, plain: bool = False) -> None:
    """The same in a loop of its own."""
    torch.set_num_threads(1)
    strategy, module = ls.ParallelStrategy(seed=0, **grid), net()
    mirrored = strategy.parallelize(module, tensor_plan=PLAN)
    optimizer = strategy.mirror(sgd(mirrored.parameters()))
    read = module if plain else mirrored

    def step(x: Tensor, y: Tensor) -> None:
        total = ls.compute_average_loss(loss(mirrored(x), y))
        (total + ls.scale_regularization_loss(penalty(read.parameters()))).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, batch)


def decay(grid: dict[str, Any]) -> dict[str, Tensor]:
    """What the errors advise in place of a penalty of squares."""
    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(seed=0, **grid)
    with strategy.scope():
        model = ls.Model(strategy.parallelize(net(), tensor_plan=PLAN))
        model.compile(lambda parameters: sgd(parameters, weight_decay=0.2), loss)
        model.fit(batches(), verbose=0)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    strategy.close()
    return weights
