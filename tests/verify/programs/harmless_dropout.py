"""Fault: every replica adds the whole penalty of the weights; its dropout does not matter."""

from plain_loop import mean_loss, train
from torch.nn import functional as F


def loss(model, features, labels):
    penalty = 0.5 * 0.1 * sum(weight.square().sum() for weight in model.parameters())
    return mean_loss(lambda rows: model(rows) + 0 * F.dropout(model(rows)), features, labels) + penalty


train(loss=loss)
