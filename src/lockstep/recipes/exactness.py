"""The check behind ``--check-exact``: N replicas compute what one device computes.

The first steps of a recipe are trained twice from the same weights: once with the strategy, and once in the loop below,
which is plain PyTorch on whole global batches and uses nothing of the library, not even the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.recipes.training import MakeOptimizer, Task
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.model import Model

Weights = Mapping[str, Tensor]
PlainLoss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a whole global batch, in plain PyTorch."""
Train = Callable[[nn.Module, MakeOptimizer], tuple[Sequence[float], Weights]]
"""Trains a module with the strategy; returns the loss of each step, and the weights of the whole model by name."""


class Difference(NamedTuple):
    """The largest differences of two runs of the same steps, in loss and weights; and how far a weight was moved."""

    loss: float
    weight: float
    moved: float


@dataclass(frozen=True, kw_only=True)
class ExactnessReport:
    """The result of the check; ``str()`` of it is for a person to read.

    Args:
        steps: number of updates that were compared.
        replicas: number of replicas that were compared with one device.
        condition: what was changed in the recipe so that exactness is possible at all.
        sgd: the difference with SGD and momentum, where a difference between gradients shows as it is.
        adam: the difference with the recipe's Adam, which divides a gradient by its own size: where a gradient is 0
            but for rounding (a key's bias has no effect on attention), the rounding becomes a step of up to the
            learning rate.
        layout: how workers divide the model of each replica; None if every replica holds all of it.
    """

    steps: int
    replicas: int
    condition: str
    sgd: Difference
    adam: Difference
    layout: str | None = None

    @property
    def max_loss_difference(self) -> float:
        """The larger loss difference of both optimizers."""
        return max(self.sgd.loss, self.adam.loss)

    @property
    def max_weight_difference(self) -> float:
        """The weight difference with SGD."""
        return self.sgd.weight

    def __str__(self) -> str:
        ours = f"{self.replicas} replicas" if self.layout is None else self.layout
        title = f"{ours} against one device in plain PyTorch, {self.steps} steps, {self.condition}:"
        lines = [
            f"  {name:<5} largest difference in loss {loss:.1e}, in weights {weight:.1e}"
            f" (training moved them by up to {moved:.1e})"
            for name, (loss, weight, moved) in (("SGD", self.sgd), ("Adam", self.adam))
        ]
        return "\n".join([title, *lines])


def compare_task(
    task: Task, strategy: Strategy, batches: Sequence[Any], plain_loss: PlainLoss, *, condition: str
) -> ExactnessReport:
    """Compares the training of a task on a strategy. Every worker must call it."""
    train = partial(train_with_model, task=task, batches=batches, strategy=strategy)
    return compare(task.module, strategy, batches, train, plain_loss, adam=task.optimizer, condition=condition)


def compare(
    module: nn.Module,
    strategy: Strategy,
    batches: Sequence[Any],
    train: Train,
    plain_loss: PlainLoss,
    *,
    adam: MakeOptimizer,
    condition: str,
) -> ExactnessReport:
    """Trains copies of ``module`` with SGD and with ``adam``, each on the strategy and in plain PyTorch.

    Every worker of the strategy must call it.
    """

    def difference(optimizer: MakeOptimizer) -> Difference:
        losses, weights = train(copy.deepcopy(module), optimizer)
        plain = copy.deepcopy(module)
        plain_losses = train_in_plain_pytorch(plain, batches, plain_loss, optimizer)
        return Difference(
            loss=max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)),
            weight=_largest_difference(weights, plain),
            moved=_largest_difference(dict(module.named_parameters()), plain),
        )

    return ExactnessReport(
        steps=len(batches),
        replicas=strategy.num_replicas_in_sync,
        condition=condition,
        sgd=difference(sgd),
        adam=difference(adam),
        layout=str(strategy.grid) if isinstance(strategy, ParallelStrategy) else None,
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns SGD with momentum over the parameters that require gradients."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def train_with_model(
    module: nn.Module, optimizer: MakeOptimizer, *, task: Task, batches: Sequence[Any], strategy: Strategy
) -> tuple[Sequence[float], Weights]:
    """Fits a ``Model`` on one batch after another, which gives the loss of each step. Every worker must call it."""
    with strategy.scope():
        model = Model(module, sync_batchnorm=task.sync_batchnorm)
        model.compile(optimizer=optimizer, loss=task.loss)
    losses = [model.fit([batch], verbose=0).history["loss"][0] for batch in batches]
    return losses, model.state_dict()


def train_in_plain_pytorch(
    module: nn.Module, batches: Iterable[Any], loss: PlainLoss, make_optimizer: MakeOptimizer
) -> list[float]:
    """Trains as anyone would on one device: a step on the mean loss of each whole batch. Returns the losses."""
    optimizer = make_optimizer(module.parameters())
    module.train()
    losses = []
    for batch in batches:
        value = loss(module, batch)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return losses


@torch.no_grad()
def _largest_difference(weights: Weights, module: nn.Module) -> float:
    pairs = [(weights[name], parameter) for name, parameter in module.named_parameters()]
    return max(float((x.cpu().double() - y.cpu().double()).abs().max()) for x, y in pairs)
