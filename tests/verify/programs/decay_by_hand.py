"""Fault: the weights shrink the more the more replicas there are."""

import torch
from plain_loop import strategy, train


def shrink(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.99**strategy.num_replicas_in_sync)


train(after=shrink)
