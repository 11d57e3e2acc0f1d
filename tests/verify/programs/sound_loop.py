"""A loop of its own as it should be: uneven last batch, accumulation, clipping, a scheduler, arguments of its own."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=8)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--clip", choices=["no", "inside", "outside"], default="no")
asked = parser.parse_args()

torch.manual_seed(1)
strategy = ls.MirroredStrategy(seed=0)
network = nn.Sequential(nn.Linear(6, asked.hidden), nn.Tanh(), nn.Linear(asked.hidden, 3))
model = strategy.mirror(network)
optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1, momentum=0.9))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

x, y = torch.randn(19, 6), torch.randint(0, 3, (19,))
batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 19, 8)]


def step(batch, rows, update):
    features, labels = batch
    loss = ls.compute_average_loss(F.cross_entropy(model(features), labels, reduction="none"), global_batch_size=rows)
    loss.backward()
    if asked.clip == "inside":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if update and asked.clip != "outside":
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


for _epoch in range(2):
    for number, (batch, (_, labels)) in enumerate(zip(strategy.distribute_dataset(batches), batches, strict=True)):
        update = (number + 1) % asked.every == 0
        strategy.run(step, (batch, len(labels), update))
        if asked.clip == "outside":
            nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if update:
            scheduler.step()
