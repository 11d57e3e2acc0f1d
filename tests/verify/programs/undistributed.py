"""Fault: every replica is given the whole batch."""

from plain_loop import train
from torch.nn import functional as F


def loss(model, features, labels):
    return F.cross_entropy(model(features), labels)


train(loss=loss, distribute=False)
