"""Fault: the global batch grows with the number of replicas."""

from plain_loop import strategy, train

train(rows=4 * strategy.num_replicas_in_sync)
