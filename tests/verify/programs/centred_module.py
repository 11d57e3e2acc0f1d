"""Fault: a module that centres the rows of its shard."""

from plain_loop import train
from torch import nn


class Centred(nn.Module):
    def forward(self, rows):
        return rows - rows.mean(0)


train(nn.Sequential(Centred(), nn.Linear(6, 3)))
