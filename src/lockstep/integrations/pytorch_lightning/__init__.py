"""The same as ``lockstep.integrations.lightning``, for programs that ``import pytorch_lightning``."""

from lockstep.extras import require

require("pytorch_lightning", "lightning")

from pytorch_lightning.strategies import Strategy  # noqa: E402  after the check above

from lockstep.integrations.lightning.strategy import ReplicaStrategy  # noqa: E402

__all__ = ["LockstepStrategy"]


class LockstepStrategy(ReplicaStrategy, Strategy):
    """``Trainer(strategy=LockstepStrategy(replicas=4))``; see ``ReplicaStrategy``."""
