"""Losses of sentence-transformers over the whole batch, in a loop: gathered embeddings, a part of the loss each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn

import lockstep as ls

ROWS = (8, 8, 7, 8, 5, 8, 8, 6)


class Encoder(nn.Module):
    """Stands for a SentenceTransformer: [rows, 6] -> [rows, 4]. The losses use its parameters for nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batches(columns: int, *, scores: bool) -> list[tuple[Tensor, ...]]:
    random = torch.Generator().manual_seed(3)
    return [
        (
            *(torch.randn(rows, 6, generator=random, dtype=torch.float64) for _ in range(columns)),
            torch.rand(rows, generator=random, dtype=torch.float64) if scores else torch.arange(rows) % 3,
        )
        for rows in ROWS
    ]


EVERY_DIRECTION = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
LOSSES: dict[str, tuple[Callable[[nn.Module], Any], int, bool]] = {
    "ranking": (losses.MultipleNegativesRankingLoss, 2, False),
    "ranking with hard negatives": (losses.MultipleNegativesRankingLoss, 3, False),
    "ranking in every direction": (
        lambda model: losses.MultipleNegativesRankingLoss(model, directions=EVERY_DIRECTION),
        2,
        False,
    ),
    "hard triplets": (losses.BatchHardTripletLoss, 1, False),
    "all triplets": (losses.BatchAllTripletLoss, 1, False),
    "CoSENT": (losses.CoSENTLoss, 2, True),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_whole_batch_trains_as_on_one_device(name: str, replicas: int, make_strategy: Any):
    make, columns, scores = LOSSES[name]
    alone, net = Encoder(), Encoder()
    one, strategy = torch.optim.SGD(alone.parameters(), 0.1), make_strategy(replicas)
    model, optimizer = strategy.mirror(net), strategy.mirror(torch.optim.SGD(net.parameters(), 0.1))
    loss_of_embeddings = make(nn.Identity()).compute_loss_from_embeddings
    for *inputs, labels in batches(columns, scores=scores):
        loss_of_embeddings([alone(x) for x in inputs], labels).backward()
        one.step()
        one.zero_grad()

    def step(*batch: Tensor) -> None:
        *inputs, labels = batch
        embeddings, all_labels = ls.gather_rows(([model(x) for x in inputs], labels))
        ls.scale_regularization_loss(loss_of_embeddings(embeddings, all_labels)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in strategy.distribute_dataset(batches(columns, scores=scores)):
        strategy.run(step, batch)
    torch.testing.assert_close(net.state_dict(), alone.state_dict(), rtol=0, atol=1e-12)
    assert not torch.equal(alone.layers[0].weight, Encoder().layers[0].weight)
