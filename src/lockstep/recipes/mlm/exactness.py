"""Shows that N replicas compute what one device computes: the first steps of the recipe, twice, compared.

Once through ``Model`` and the strategy; once in the loop below, which is plain PyTorch on whole global batches and
shares nothing with the engine, not even the loss. Dropout is off: its masks are drawn per replica by definition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.recipes.mlm.batches import Inputs
from lockstep.recipes.mlm.build import build_mlm, build_optimizer
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.loss import masked_token_loss
from lockstep.recipes.mlm.masking import IGNORED_LABEL
from lockstep.recipes.mlm.model import MaskedLanguageModel
from lockstep.strategies.base import Strategy
from lockstep.train.model import Model

Batch = tuple[Inputs, Tensor]
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
        sgd: with SGD and momentum, where a difference in gradients shows as it is.
        adam: with the recipe's Adam, which divides a gradient by its own size: where a gradient is 0 but for rounding
            (a key's bias has no effect on attention), rounding itself becomes a step of up to the learning rate.
    """

    steps: int
    replicas: int
    sgd: Difference
    adam: Difference

    @property
    def max_loss_difference(self) -> float:
        """The larger of both optimizers'."""
        return max(self.sgd.loss, self.adam.loss)

    @property
    def max_weight_difference(self) -> float:
        """With SGD."""
        return self.sgd.weight

    def __str__(self) -> str:
        title = f"{self.replicas} replicas against one device in plain PyTorch, {self.steps} steps, no dropout:"
        lines = [
            f"  {d.optimizer:<5} largest difference in loss {d.loss:.1e}, in weights {d.weight:.1e}"
            f" (training moved them by up to {d.moved:.1e})"
            for d in (self.sgd, self.adam)
        ]
        return "\n".join([title, *lines])


def check_exactness(config: MlmConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Args:
        config: the run; its dropout is taken as 0.
        strategy: the replicas to compare with one device.
        steps: global batches to train, each one update.

    Raises:
        ConfigError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps} was given, expected at least 1 step to compare; try 3")
    task = build_mlm(replace(config, dropout=0.0))
    batches = list(islice(task.train, steps))
    return ExactnessReport(
        steps=len(batches),
        replicas=strategy.num_replicas_in_sync,
        sgd=_compare("SGD", task.module, batches, strategy, _sgd),
        adam=_compare("Adam", task.module, batches, strategy, partial(build_optimizer, config)),
    )


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def _compare(
    name: str, module: MaskedLanguageModel, batches: Sequence[Batch], strategy: Strategy, optimizer: MakeOptimizer
) -> Difference:
    ours, plain = copy.deepcopy(module), copy.deepcopy(module)
    our_losses = train_with_strategy(ours, batches, strategy, optimizer)
    plain_losses = train_in_plain_pytorch(plain, batches, optimizer)
    return Difference(
        optimizer=name,
        loss=max(abs(a - b) for a, b in zip(our_losses, plain_losses, strict=True)),
        weight=_largest_difference(ours, plain),
        moved=_largest_difference(module, plain),
    )


def train_with_strategy(
    module: nn.Module, batches: Sequence[Batch], strategy: Strategy, optimizer: MakeOptimizer
) -> list[float]:
    """One fit of one step for each batch, so that the loss of every step is seen."""
    with strategy.scope():
        model = Model(module)
        model.compile(optimizer=optimizer, loss=masked_token_loss)
    return [model.fit([batch], verbose=0).history["loss"][0] for batch in batches]


def train_in_plain_pytorch(module: nn.Module, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """The loop that anyone would write for one device: the mean cross-entropy of the whole batch, and a step."""
    optimizer = make_optimizer(module.parameters())
    losses = []
    for inputs, labels in batches:
        loss = F.cross_entropy(module(**inputs), labels[labels != IGNORED_LABEL])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def _largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x.cpu().double() - y.cpu().double()).abs().max()) for x, y in pairs)
