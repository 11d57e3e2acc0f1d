"""Fault: the order of the rows is another one at every start."""

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


generator = torch.Generator()
generator.seed()
order = torch.randperm(24, generator=generator)
batches = [(x[rows], y[rows]) for rows in order.split(8)]
for batch in strategy.distribute_dataset(batches):
    strategy.run(step, (batch,))
