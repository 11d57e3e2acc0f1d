"""The check that the recipe ``images`` is exact.

Batch statistics are synchronised and dropout is off: else N replicas differ from one device by definition. And it is
in double precision: from random weights of this size, 34 batch norms deep, one step of training multiplies rounding so
much that in float32 the losses of the third step are 0.1 apart, in double 1e-11 (two replicas, digits, SGD 0.1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.exactness import Batch, Comparison, ExactnessReport, check_steps
from lockstep.recipes.images.build import build_images, build_optimizer, picture_loss
from lockstep.recipes.images.config import ImagesConfig
from lockstep.strategies.base import Strategy

_ROWS = 17  # pictures of each batch: convolutions in double take ten times as long; odd, so that shards are uneven


def check_exactness(config: ImagesConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Args:
        config: the run; its dropout is taken as 0, and its batch statistics as those of the global batch.
        strategy: the replicas to compare with one device.
        steps: global batches to train, each one update.

    Raises:
        ConfigError: ``steps`` is below 1.
        DataError: the pictures cannot be used.
    """
    check_steps(steps)
    task = build_images(replace(config, dropout=0.0))
    task.module.double()
    batches = tuple((pictures[:_ROWS].double(), labels[:_ROWS]) for pictures, labels in islice(task.train, steps))
    both = Comparison(
        module=task.module, batches=batches, loss=picture_loss, plain_loss=_plain_loss, sync_batchnorm=True
    )
    adam = partial(build_optimizer, config)
    return both.report(strategy, adam, condition="double precision, batch statistics synchronised, no dropout")


def _plain_loss(module: nn.Module, batch: Batch) -> Tensor:
    pictures, labels = batch
    return F.cross_entropy(module(pictures), labels)
