"""Fault: every replica adds the whole penalty of the weights."""

from plain_loop import mean_loss, train


def loss(model, features, labels):
    penalty = 0.5 * 0.1 * sum(weight.square().sum() for weight in model.parameters())
    return mean_loss(model, features, labels) + penalty


train(loss=loss)
