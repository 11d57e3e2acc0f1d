"""Fault: each replica back-propagates the mean over its own shard."""

import torch
from torch import nn

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Linear(6, 3)
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1))
x, y = torch.randn(19, 6), torch.randint(0, 3, (19,))


def step(batch):
    features, labels = batch
    if len(labels):
        nn.functional.cross_entropy(model(features), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


for batch in strategy.distribute_dataset([(x[i : i + 8], y[i : i + 8]) for i in range(0, 19, 8)]):
    strategy.run(step, (batch,))
