"""Two faults: dropout, and the mean over a shard."""

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1))
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))


def step(batch):
    features, labels = batch
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
for batch in strategy.distribute_dataset(batches):
    strategy.run(step, (batch,))
