"""The check that the recipe ``mlm`` is exact. Dropout is off: its masks are drawn per replica by definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.exactness import Batch, Comparison, ExactnessReport, check_steps
from lockstep.recipes.mlm.build import build_mlm, build_optimizer, read_text
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.loss import masked_token_loss
from lockstep.recipes.mlm.masking import IGNORED_LABEL
from lockstep.recipes.text.for_all import text_for_all
from lockstep.strategies.base import Strategy


def check_exactness(config: MlmConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Args:
        config: the run; its dropout is taken as 0.
        strategy: the replicas to compare with one device.
        steps: global batches to train, each one update.

    Raises:
        ConfigError: ``steps`` is below 1.
    """
    check_steps(steps)
    text = text_for_all(partial(read_text, config), strategy.workers)
    task = build_mlm(replace(config, dropout=0.0), text)
    batches = tuple(islice(task.train, steps))
    both = Comparison(module=task.module, batches=batches, loss=masked_token_loss, plain_loss=_plain_loss)
    adam = partial(build_optimizer, config)
    return both.report(strategy, adam, condition="no dropout")


def _plain_loss(module: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(module(**inputs), labels[labels != IGNORED_LABEL])
