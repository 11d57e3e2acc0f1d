"""Shows that N replicas compute what one device computes: the first steps of a recipe, twice, compared.

Once through ``Model`` and the strategy; once in the loop below, which is plain PyTorch on whole global batches and
shares nothing with the engine, not even the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.compile import Loss
from lockstep.train.model import Model

Batch = tuple[Any, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two runs of the same steps with the same optimizer are apart.

    Args:
        optimizer: its name.
        loss: largest difference between the losses of a step.
        weight: largest difference between two values of a weight after the last step.
        moved: how far training moved the weight that it moved most, to compare with.
    """

    optimizer: str
    loss: float
    weight: float
    moved: float


@dataclass(frozen=True, kw_only=True)
class ExactnessReport:
    """What the check found. ``str()`` of it is for a person.

    Args:
        steps: updates compared.
        replicas: number of replicas compared with one device.
        condition: what was changed in the run so that it can be exact at all.
        layout: how workers divide each replica's model among them; None where every replica holds all of it.
        sgd: with SGD and momentum, where a difference in gradients shows as it is.
        adam: with the recipe's Adam, which divides a gradient by its own size: where a gradient is 0 but for rounding
            (a key's bias has no effect on attention), rounding itself becomes a step of up to the learning rate.
    """

    steps: int
    replicas: int
    condition: str
    sgd: Difference
    adam: Difference
    layout: str | None = None

    @property
    def max_loss_difference(self) -> float:
        """The larger of both optimizers'."""
        return max(self.sgd.loss, self.adam.loss)

    @property
    def max_weight_difference(self) -> float:
        """With SGD."""
        return self.sgd.weight

    def __str__(self) -> str:
        ours = f"{self.replicas} replicas" if self.layout is None else self.layout
        title = f"{ours} against one device in plain PyTorch, {self.steps} steps, {self.condition}:"
        lines = [
            f"  {d.optimizer:<5} largest difference in loss {d.loss:.1e}, in weights {d.weight:.1e}"
            f" (training moved them by up to {d.moved:.1e})"
            for d in (self.sgd, self.adam)
        ]
        return "\n".join([title, *lines])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is trained both ways.

    Args:
        module: the model as it begins, on the CPU; it is copied.
        batches: global batches, one update each.
        loss: what a ``Model`` is compiled with.
        plain_loss: the mean loss of a whole global batch, given the module and the batch, in plain PyTorch.
        sync_batchnorm: whether the strategy takes batch statistics over the global batch.
    """

    module: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    plain_loss: Callable[[nn.Module, Batch], Tensor]
    sync_batchnorm: bool = False

    def report(self, strategy: Strategy, adam: MakeOptimizer, *, condition: str) -> ExactnessReport:
        """Compares them with SGD, and with the recipe's Adam; ``condition`` is that of the report."""
        return ExactnessReport(
            steps=len(self.batches),
            replicas=strategy.num_replicas_in_sync,
            condition=condition,
            sgd=self.between("SGD", plain_sgd, strategy),
            adam=self.between("Adam", adam, strategy),
            layout=str(strategy.grid) if isinstance(strategy, ParallelStrategy) else None,
        )

    def between(self, name: str, optimizer: MakeOptimizer, strategy: Strategy) -> Difference:
        """Trains the steps with the strategy and again without it, from the same weights, and compares."""
        ours, plain = copy.deepcopy(self.module), copy.deepcopy(self.module)
        trained = train_with_strategy(self, ours, strategy, optimizer)
        plain_losses = train_in_plain_pytorch(plain, self.batches, self.plain_loss, optimizer)
        return Difference(
            optimizer=name,
            loss=max(abs(a - b) for a, b in zip(trained.losses, plain_losses, strict=True)),
            weight=difference_from(trained.weights, plain),
            moved=largest_difference(self.module, plain),
        )


def check_steps(steps: int) -> None:
    """Refuses to compare nothing.

    Raises:
        ConfigError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps} was given, expected at least 1 step to compare; try 3")


def plain_sgd(parameters: Iterable[nn.Parameter], *, lr: float = 0.1) -> torch.optim.Optimizer:
    """SGD with momentum over what is trained."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """What steps with a strategy came to.

    Args:
        losses: of each step.
        weights: of the whole model after the last, by name.
    """

    losses: Sequence[float]
    weights: Mapping[str, Tensor]


def train_with_strategy(
    comparison: Comparison, module: nn.Module, strategy: Strategy, optimizer: MakeOptimizer
) -> TrainedWeights:
    """One fit of one step for each batch, so that the loss of every step is seen. Every worker must call it."""
    with strategy.scope():
        model = Model(module, sync_batchnorm=comparison.sync_batchnorm)
        model.compile(optimizer=optimizer, loss=comparison.loss)
    losses = [model.fit([batch], verbose=0).history["loss"][0] for batch in comparison.batches]
    return TrainedWeights(losses=losses, weights=model.state_dict())


def train_in_plain_pytorch(
    module: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor], make_optimizer: MakeOptimizer
) -> list[float]:
    """The loop that anyone would write for one device: the mean loss of the whole batch, and a step."""
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


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Between two values of a weight that two modules of the same kind have."""
    return difference_from(dict(a.named_parameters()), b)


@torch.no_grad()
def difference_from(weights: Mapping[str, Tensor], module: nn.Module) -> float:
    """The largest between two values of a weight: those of ``module``, and those of its names in ``weights``."""
    pairs = [(weights[name], parameter) for name, parameter in module.named_parameters()]
    return max(float((x.cpu().double() - y.cpu().double()).abs().max()) for x, y in pairs)
