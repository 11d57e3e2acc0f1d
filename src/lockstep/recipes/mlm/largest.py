"""The largest global batch of the recipe ``mlm`` that fits a strategy's devices."""

from __future__ import annotations

from lockstep.recipes.largest_batch import LargestBatch, largest_batch
from lockstep.recipes.mlm.build import build_mlm
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.loss import masked_token_loss
from lockstep.recipes.mlm.run import compile_mlm
from lockstep.strategies.base import Strategy
from lockstep.train.compile import CompileConfig


def largest_mlm_batch(config: MlmConfig, strategy: Strategy) -> LargestBatch:
    """Tries batches whose lines are all as long as a line can be, so that what fits does so in every batch.

    Args:
        config: the run; its batch size is where the search begins.
        strategy: the devices.

    Raises:
        DeviceMemoryError: not even one line a replica fits.
    """
    task = build_mlm(config)
    steps = CompileConfig(loss=masked_token_loss, precision=config.precision, clip_norm=config.clip_norm)
    return largest_batch(
        compile_mlm(config, task, strategy),
        steps,
        task.train.longest,
        start=config.batch_size,
        examples=task.train.lines,
    )
