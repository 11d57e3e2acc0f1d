"""Contrastive losses, each by hand for one device and as a step of a replica, and a loop that trains with them.

A batch is (x [rows, 6], pairs [rows, 6], labels [rows]). The first loss of a pair sees the whole batch and returns its
mean. The second sees the shard and returns the losses of the shard's rows, or a number that is its part of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls

Batch = tuple[Tensor, Tensor, Tensor]
ROWS = (8, 8, 8, 7, 3, 8, 5, 2)
"""Of the batches: the last has fewer than three replicas, so one of them has none."""


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(rows, 6, generator=random, dtype=torch.float64),
            torch.randn(rows, 6, generator=random, dtype=torch.float64),
            torch.arange(rows) % 3,
        )
        for rows in ROWS
    ]


class Encoder(nn.Module):
    """Maps [rows, 6] to unit vectors [rows, 4]. ``refuses_none``: as attention, it cannot take 0 rows."""

    def __init__(self, *, refuses_none: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.refuses_none = refuses_none

    def forward(self, x: Tensor) -> Tensor:
        if self.refuses_none and not len(x):
            raise ValueError("no rows")
        return F.normalize(self.layers(x), dim=1)


def ranking(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    """MultipleNegativesRanking: row i of the pairs belongs to row i, the others are its negatives."""
    return F.cross_entropy(20 * z @ pairs.T, torch.arange(len(z)))


def ranking_of_shard(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(20 * z @ ls.gather_rows(pairs).T, ls.row_numbers(z), reduction="none")


def clip(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    logits, numbers = 10 * z @ pairs.T, torch.arange(len(z))
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def clip_of_shard(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    (all_z, all_pairs), numbers = ls.gather_rows((z, pairs)), ls.row_numbers(z)
    one = F.cross_entropy(10 * z @ all_pairs.T, numbers, reduction="none")
    return (one + F.cross_entropy(10 * pairs @ all_z.T, numbers, reduction="none")) / 2


def simclr(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    """NT-Xent: both views of a row are anchors, and all other views of the batch are candidates."""
    views, rows = torch.cat([z, pairs]), len(z)
    logits = 5 * views @ views.T
    logits = logits.masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


def simclr_of_shard(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    numbers = ls.row_numbers(z)
    views = torch.cat(ls.gather_rows((z, pairs)))
    rows = len(views) // 2
    losses = []
    for view, place, target in ((z, numbers, numbers + rows), (pairs, numbers + rows, numbers)):
        logits = (5 * view @ views.T).scatter(1, place[:, None], -1e9)
        losses.append(F.cross_entropy(logits, target, reduction="none"))
    return (losses[0] + losses[1]) / 2


def supcon(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    """Rows of the same label are positives; anchors without one do not count."""
    logits = 5 * z @ z.T
    logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    positives = (labels[:, None] == labels) & ~torch.eye(len(z), dtype=torch.bool)
    likelihoods = (logits.log_softmax(1) * positives).sum(1) / positives.sum(1).clamp(min=1)
    counted = positives.any(1)
    return -likelihoods[counted].sum() / counted.sum().clamp(min=1)


def supcon_of_shard(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    numbers = ls.row_numbers(z)
    all_z, all_labels = ls.gather_rows((z, labels))
    logits = (5 * z @ all_z.T).scatter(1, numbers[:, None], -1e9)
    positives = (labels[:, None] == all_labels).scatter(1, numbers[:, None], False)
    likelihoods = (logits.log_softmax(1) * positives).sum(1) / positives.sum(1).clamp(min=1)
    counted = positives.any(1)
    context = ls.get_replica_context()
    count = counted.sum() if context is None else context.all_reduce("sum", counted.sum())
    return -(likelihoods * counted).sum() / count.clamp(min=1)


def triplets(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    """Batch-hard: the farthest row of the same label, and the nearest of another one."""
    distances = (z[:, None] - z).square().sum(2)
    same = labels[:, None] == labels
    hardest_positive = (distances * same).amax(1)
    hardest_negative = distances.masked_fill(same, 100.0).amin(1)
    return (hardest_positive - hardest_negative + 0.5).relu().mean()


def triplets_of_shard(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    all_z, all_labels = ls.gather_rows((z, labels))
    distances = (z[:, None] - all_z).square().sum(2)
    same = labels[:, None] == all_labels
    hardest_positive = (distances * same).amax(1)
    hardest_negative = distances.masked_fill(same, 100.0).amin(1)
    return (hardest_positive - hardest_negative + 0.5).relu()


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "ranking": (ranking, ranking_of_shard),
    "CLIP": (clip, clip_of_shard),
    "SimCLR": (simclr, simclr_of_shard),
    "SupCon": (supcon, supcon_of_shard),
    "triplets": (triplets, triplets_of_shard),
}


def train_on_one_device(loss: Loss) -> tuple[dict[str, Tensor], list[float]]:
    """The weights and losses of a plain loop."""
    encoder, losses = Encoder(), []
    optimizer = torch.optim.SGD(encoder.parameters(), 0.5)
    for x, pairs, labels in batches():
        total = loss(encoder(x), encoder(pairs), labels)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return encoder.state_dict(), losses


def train(
    strategy: Any, name: str, *, whole: bool = False, refuses_none: bool = False, chunk: int = 0
) -> tuple[Any, list[float]]:
    """The same on replicas: with the losses of each shard's rows, or with the whole loss in every replica.

    ``chunk``: so many rows at a time are encoded, and again in the backward pass.
    """
    encoder = Encoder(refuses_none=refuses_none)
    model = strategy.mirror(encoder)
    optimizer = strategy.mirror(torch.optim.SGD(encoder.parameters(), 0.5))
    of_batch, of_shard = LOSSES[name]

    def encoded(rows: Tensor) -> Tensor:
        if chunk:
            return torch.cat([checkpoint(model, part, use_reentrant=False) for part in rows.split(chunk)])
        return model(rows) if ls.has_rows(rows) or not refuses_none else rows.new_zeros(0, 4)

    def step(x: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
        z, z_pairs = encoded(x), encoded(pairs)
        if whole:
            loss = ls.scale_regularization_loss(of_batch(*ls.gather_rows((z, z_pairs, labels))))
        else:
            loss = of_shard(z, z_pairs, labels)
            loss = ls.compute_average_loss(loss) if loss.ndim else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[float] = []
    data: Sequence[Any] = strategy.distribute_dataset(batches())
    for batch in data:
        losses.append(float(strategy.reduce("sum", strategy.run(step, batch))))
    return {key: value.clone() for key, value in encoder.state_dict().items()}, losses
