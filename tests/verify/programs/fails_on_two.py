"""A program whose replicas do not meet: the first alone steps."""

import torch

import lockstep as ls

strategy = ls.MirroredStrategy(seed=0)
network = torch.nn.Linear(2, 1)
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1))


def step():
    model(torch.ones(1, 2)).sum().backward()
    if ls.get_replica_context().replica_id_in_sync_group == 0:
        optimizer.step()


strategy.run(step)
