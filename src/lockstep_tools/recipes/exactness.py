"""The check behind ``--check-exact``: N replicas compute what one device computes.

The first steps of a recipe are trained twice from the same weights: once with ``Model`` on the strategy, and once in
the loop below, which is plain PyTorch on whole global batches and uses nothing of the library, not even the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy
from lockstep.train.model import Model
from lockstep_tools.recipes.training import MakeOptimizer, Task

PlainLoss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a whole global batch, in plain PyTorch."""


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
        compared: what was compared with one device: the replicas, or how workers divide the model.
        condition: what was changed in the recipe so that exactness is possible at all.
        sgd: the difference with SGD and momentum, where a difference between gradients shows as it is.
        adam: the difference with the recipe's Adam, which divides a gradient by its own size: where a gradient is 0
            but for rounding (a key's bias has no effect on attention), the rounding becomes a step of up to the
            learning rate.
    """

    steps: int
    compared: str
    condition: str
    sgd: Difference
    adam: Difference

    def __str__(self) -> str:
        title = f"{self.compared} against one device in plain PyTorch, {self.steps} steps, {self.condition}:"
        lines = [
            f"  {name:<5} largest difference in loss {loss:.1e}, in weights {weight:.1e}"
            f" (training moved them by up to {moved:.1e})"
            for name, (loss, weight, moved) in (("SGD", self.sgd), ("Adam", self.adam))
        ]
        return "\n".join([title, *lines])


def compare(
    task: Task, strategy: Strategy, batches: Sequence[Any], plain_loss: PlainLoss, condition: str
) -> ExactnessReport:
    """Trains copies of the module with SGD and with the recipe's Adam, each on the strategy and in plain PyTorch.

    Every worker of the strategy must call it.
    """

    if not batches:
        raise ConfigError("steps=0 was given, expected at least 1")

    def difference(make_optimizer: MakeOptimizer) -> Difference:
        with strategy.scope():
            model = Model(copy.deepcopy(task.module), sync_batchnorm=task.sync_batchnorm)
            model.compile(optimizer=make_optimizer, loss=task.loss)
        # A ``fit`` for each batch gives the loss of every step; an epoch would give their mean.
        losses = [model.fit([batch], verbose=0).history["loss"][0] for batch in batches]
        plain = copy.deepcopy(task.module)
        plain_losses = train_in_plain_pytorch(plain, batches, plain_loss, make_optimizer)
        return Difference(
            loss=max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)),
            weight=_largest_difference(model.state_dict(), plain),
            moved=_largest_difference(dict(task.module.named_parameters()), plain),
        )

    return ExactnessReport(
        steps=len(batches),
        compared=str(strategy.layout or f"{strategy.num_replicas_in_sync} replicas"),
        condition=condition,
        sgd=difference(sgd),
        adam=difference(task.optimizer),
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns SGD with momentum over the parameters that require gradients."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


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
def _largest_difference(weights: Mapping[str, Tensor], module: nn.Module) -> float:
    pairs = [(weights[name], parameter) for name, parameter in module.named_parameters()]
    return max(float((x.cpu().double() - y.cpu().double()).abs().max()) for x, y in pairs)
