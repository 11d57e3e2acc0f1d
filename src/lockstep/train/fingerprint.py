"""``ls.fingerprint``: 16 hex digits by which people compare two trainings, and the line that ends a training."""

from __future__ import annotations

from typing import Any

from lockstep.checkpoint.fingerprint import fingerprint_of
from lockstep.errors import ConfigError
from lockstep.train.model import Model


def fingerprint(*things: Any) -> str:
    """16 hex digits of all state of a training: equal for two trainings only if every bit of it is.

    In it are weights, each replica's buffers, the state of optimizer, scheduler and gradient scaler, the random numbers
    of all replicas and, of a ``Model``, the position in the data. Not in it are what they are spread over (devices,
    workers, shards), strides, times, paths, histories, and the random numbers of the processes, which what reads the
    data draws from. Every worker must call it, outside replicas; all get the same digits.

    Args:
        *things: a ``Model``; or of a custom loop what an ``ls.Checkpoint`` takes: mirrored or plain modules and
            optimizers, schedulers, variables, in an order of your choice, which counts.

    Raises:
        ConfigError: nothing was given, a ``Model`` with other things, or a thing without state.
        CheckpointError: a state that no checkpoint can hold.
        CollectiveError, ClusterError: a worker did not call it; the message names it.

    Example:
        >>> import torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy(["cpu:0"], seed=0)
        >>> net = strategy.mirror(torch.nn.Linear(2, 1))
        >>> optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.1))
        >>> len(ls.fingerprint(net, optimizer))
        16
    """
    if len(things) == 1 and isinstance(things[0], Model):
        return things[0].fingerprint()
    if not things or any(isinstance(thing, Model) for thing in things):
        kinds = ", ".join(type(thing).__name__ for thing in things) or "nothing"
        raise ConfigError(f"fingerprint got {kinds}; give one Model, or modules and optimizers of a custom loop")
    return fingerprint_of({f"thing {number}": thing for number, thing in enumerate(things)})
