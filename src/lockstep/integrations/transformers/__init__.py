"""The Transformers ``Trainer`` on the replicas of a strategy: the same arguments, the same numbers, N devices.

    trainer              the Trainer: begin here
    trainer_classes      distribute: the same of any other subclass of transformers' Trainer
    replica_view         what the methods of a Trainer see as their Trainer in a replica
    sharding             divides a collated batch, and joins outputs
    loss_normalization   weighs the loss of each shard, and checks that it may be
    whole_batch_losses   losses of sentence-transformers that compare the rows of a batch
    examples             counts the examples of batches whose rows are not one an example
    arguments            which strategy is used, arguments that are refused, and what transformers sees of the devices
    sync                 what the workers agree on, and the random states in checkpoints

Importing it needs ``transformers`` and ``accelerate``: ``pip install 'torch-lockstep[transformers]'``.
"""

from lockstep.extras import require

require("transformers", "transformers")
require("accelerate", "transformers")

from lockstep.integrations.transformers.trainer import Trainer  # noqa: E402  after the checks above
from lockstep.integrations.transformers.trainer_classes import distribute  # noqa: E402

__all__ = ["Trainer", "distribute"]
