"""Fault: the weights shrink the more the more replicas there are."""

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Linear(6, 3)
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1))
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))


def step(batch):
    features, labels = batch
    loss = ls.compute_average_loss(F.cross_entropy(model(features), labels, reduction="none"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.99**strategy.num_replicas_in_sync)


batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
for batch in strategy.distribute_dataset(batches):
    strategy.run(step, (batch,))
