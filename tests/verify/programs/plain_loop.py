"""The loop of the programs beside it, without a fault: each gives it one, or several."""

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)


def mean_loss(model, features, labels):
    return ls.compute_average_loss(F.cross_entropy(model(features), labels, reduction="none"))


def train(network=None, loss=mean_loss, *, rate=0.1, rows=8, order=None, distribute=True, after=lambda model: None):
    """Trains on 24 rows, ``rows`` at a time, in an ``order``; calls ``after`` at the end of each step."""
    network = nn.Linear(6, 3) if network is None else network
    model = strategy.mirror(network)
    optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), rate))
    x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
    order = torch.arange(24) if order is None else order
    batches = [(x[chosen], y[chosen]) for chosen in order.split(rows)]

    def step(batch):
        loss(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)

    for batch in strategy.distribute_dataset(batches) if distribute else batches:
        strategy.run(step, (batch,))
