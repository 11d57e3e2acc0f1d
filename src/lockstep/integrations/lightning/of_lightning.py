"""The strategy for the package ``lightning``."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy

from lockstep.integrations.lightning.strategy import ReplicaStrategy


class LockstepStrategy(ReplicaStrategy, Strategy):
    """``Trainer(strategy=LockstepStrategy(replicas=4))``; see ``ReplicaStrategy``."""
