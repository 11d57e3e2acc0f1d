"""Lightning's Trainer on the replicas of a strategy: an unchanged LightningModule, N devices in one process.

    strategy      what Lightning calls: begin here
    steps         runs training_step and its like on shards
    values        numbers of the batch from those of shards
    rules         which way of combining them a number follows
    logged        self.log
    metrics       torchmetrics of the module
    attributes    what steps set on the module
    joined        outputs
    optimizer     optimizers, whose step is one of all replicas

``LockstepStrategy`` is for ``import lightning``; that for ``import pytorch_lightning``, which is another package with
classes of its own, is in ``lockstep.integrations.pytorch_lightning``.
"""

from typing import Any

from lockstep.extras import require

__all__ = ["LockstepStrategy"]


def __getattr__(name: str) -> Any:
    # When it is asked for: who uses pytorch_lightning need not have the package lightning.
    if name == "LockstepStrategy":
        require("lightning.pytorch", "lightning")
        from lockstep.integrations.lightning.of_lightning import LockstepStrategy

        return LockstepStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
