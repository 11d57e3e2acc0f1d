"""Fault: each replica back-propagates the loss of the whole batch, summed over the replicas."""

import torch
from torch import nn

import lockstep as ls

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Linear(6, 3)
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1))
x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))


def step(batch):
    features, labels = batch
    loss = ls.compute_average_loss(
        nn.functional.cross_entropy(model(features), labels, reduction="none"), global_batch_size=8
    )
    ls.get_replica_context().all_reduce("sum", loss).backward()
    optimizer.step()
    optimizer.zero_grad()


for batch in strategy.distribute_dataset(list(zip(x.split(8), y.split(8), strict=True))):
    strategy.run(step, (batch,))
