"""Fault: the learning rate grows with the number of replicas."""

from plain_loop import strategy, train

train(rate=0.1 * strategy.num_replicas_in_sync)
