"""A program with a strategy of one device and two of several; it swallows exceptions, and trains on and on."""

import contextlib

import torch
from torch import nn

import lockstep as ls


def train(strategy, epochs):
    torch.manual_seed(1)
    network = nn.Linear(6, 3)
    with strategy.scope():
        model = ls.Model(network)
        model.compile(optimizer=torch.optim.SGD(network.parameters(), 0.1), loss=nn.CrossEntropyLoss(reduction="none"))
    model.fit([(torch.randn(7, 6), torch.arange(7) % 3)], epochs=epochs, verbose=0)


train(ls.MirroredStrategy(["cpu:0"], seed=0), 1)
first, second = ls.MirroredStrategy(seed=0), ls.MirroredStrategy(["cpu:1", "cpu:0"], seed=0)
with contextlib.suppress(Exception):
    train(first, 1_000_000)
train(second, 1_000_000)
