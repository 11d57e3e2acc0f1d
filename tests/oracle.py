"""One device in plain PyTorch: the training loop that tests compare with, and three small nets with their batches.

Nothing of lockstep is imported here. Everything is float64, so that what differs is the order of additions (1e-9), and
every function seeds itself: called twice, it returns the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (7, 7, 6, 5, 1)
"""Rows of the global batches. The last one has fewer rows than two, three or four replicas."""

Batch = Any
"""``x`` or (x, y) or (x, y, sample weights); an ``x`` that is a dict is keyword arguments."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.1)


@dataclass(frozen=True)
class Training:
    """What ``train`` returns: the trained module and its optimizer, and the numbers of every update.

    Attributes:
        sums: the sum of the losses of an update's examples, and their count.
        norms: of the gradients, before they are clipped.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    sums: list[tuple[float, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The mean loss of every update."""
        return [total / count for total, count in self.sums]

    def epoch_losses(self, epochs: int) -> list[float]:
        """The mean losses of its epochs: sums divided once."""
        updates = len(self.sums) // epochs
        parts = [self.sums[start : start + updates] for start in range(0, len(self.sums), updates)]
        return [sum(total for total, _ in part) / sum(count for _, count in part) for part in parts]


def train(
    module: nn.Module,
    batches: Iterable[Batch],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    loss: Callable[..., Any] = F.cross_entropy,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip_norm: float = torch.inf,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    before_update: Callable[[nn.Module], object] = lambda module: None,
    after_update: Callable[[nn.Module], object] = lambda module: None,
) -> Training:
    """Trains the module itself; ``accumulate`` batches make an update, whose sum of losses is divided once.

    Args:
        loss: ``loss(outputs, targets)`` returns losses of any shape, or their mean over the rows, or (total, count).
    """
    record = Training(module, optimizer(module.parameters()))
    schedule = None if scheduler is None else scheduler(record.optimizer)
    for _ in range(epochs):
        for cycle in _cycles(list(batches), accumulate):
            totals, counts = zip(*(_total_and_count(module, batch, loss) for batch in cycle), strict=True)
            record.optimizer.zero_grad()
            (sum(totals) / sum(counts)).backward()
            before_update(module)
            record.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip_norm)))
            record.optimizer.step()
            after_update(module)
            if schedule is not None:
                schedule.step()
            record.sums.append((float(sum(totals).detach()), float(sum(counts))))
    return record


def _cycles(batches: Sequence[Batch], size: int) -> Iterator[Sequence[Batch]]:
    for start in range(0, len(batches), size):
        yield batches[start : start + size]


def _total_and_count(module: nn.Module, batch: Batch, loss: Callable[..., Any]) -> tuple[Tensor, float]:
    x, *targets = batch if isinstance(batch, (tuple, list)) else (batch,)
    outputs, rows = (module(**x), len(next(iter(x.values())))) if isinstance(x, dict) else (module(x), len(x))
    losses = loss(outputs, *targets[:1])
    if isinstance(losses, tuple):
        return losses[0], float(losses[1])
    if losses.dim() == 0:
        return losses * rows, rows
    return (losses * targets[1]).sum() if targets[1:] else losses.sum(), losses.numel()


def mlp(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    """For ``vectors``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def conv_net() -> nn.Sequential:
    """For ``images``; with batch norm."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    return nn.Sequential(*layers).double()


class TokenNet(nn.Module):
    """For ``sentences``: tokens in, tokens out, over one embedding; with a layer that no loss ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embed(tokens)))
        return logits


def token_net() -> TokenNet:
    torch.manual_seed(0)
    return TokenNet().double()


def vectors(sizes: Sequence[int] = SIZES, inputs: int = 4, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), inputs, generator=random, dtype=torch.float64)
    return _split(sizes, x, torch.randint(classes, (sum(sizes),), generator=random))


def images(sizes: Sequence[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 1, 5, 5, generator=random, dtype=torch.float64)
    return _split(sizes, x, torch.randint(3, (sum(sizes),), generator=random))


def sentences(sizes: Sequence[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    """Six tokens a row; the targets behind the end of a row are -100, and a row has 1 to 6 others."""
    random = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(11, (2, sum(sizes), 6), generator=random)
    lengths = torch.randint(1, 7, (sum(sizes), 1), generator=random)
    return _split(sizes, tokens, targets.masked_fill(torch.arange(6) >= lengths, -100))


def weighted(batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """With a sample weight a row."""
    random = torch.Generator().manual_seed(2)
    return [(x, y, torch.rand(len(x), generator=random, dtype=torch.float64) * 3) for x, y in batches]


def _split(sizes: Sequence[int], x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def token_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the tokens that are not padding (-100), and how many there are."""
    is_token = targets != -100
    return F.cross_entropy(outputs[is_token], targets[is_token], reduction="sum"), is_token.sum()


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Compares numbers, tensors, lists and dicts of them; a module stands for its state."""
    actual, expected = (dict(a.state_dict()) if isinstance(a, nn.Module) else a for a in (actual, expected))
    if isinstance(expected, Mapping):
        actual, expected = dict(actual), dict(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
