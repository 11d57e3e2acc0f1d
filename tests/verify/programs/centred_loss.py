"""Fault: the loss of an example depends on the other examples of its shard."""

import torch
from torch import nn

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Linear(6, 3)
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1))
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))


def step(batch):
    features, _ = batch
    outputs = model(features)
    loss = ls.compute_average_loss((outputs - outputs.mean(0)).square().sum(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
for batch in strategy.distribute_dataset(batches):
    strategy.run(step, (batch,))
