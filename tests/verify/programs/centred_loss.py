"""Fault: the loss of an example depends on the other examples of its shard."""

from plain_loop import train

import lockstep as ls


def loss(model, features, labels):
    outputs = model(features)
    return ls.compute_average_loss((outputs - outputs.mean(0)).square().sum(1))


train(loss=loss)
