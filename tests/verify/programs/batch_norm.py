"""Fault: batch norms take the statistics of each replica's shard."""

import torch
from torch import nn

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
with strategy.scope():
    model = ls.Model(network)
    model.compile(optimizer=torch.optim.SGD(network.parameters(), 0.1), loss=nn.CrossEntropyLoss(reduction="none"))
x, y = torch.randn(19, 1, 6, 6), torch.randint(0, 3, (19,))
model.fit([(x[i : i + 8], y[i : i + 8]) for i in range(0, 19, 8)], verbose=0)
