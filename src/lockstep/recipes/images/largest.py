"""The largest global batch of the recipe ``images`` that fits a strategy's devices."""

from __future__ import annotations

from lockstep.recipes.images.build import build_images, picture_loss
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.run import compile_images
from lockstep.recipes.largest_batch import LargestBatch, largest_batch
from lockstep.strategies.base import Strategy
from lockstep.train.compile import CompileConfig


def largest_images_batch(config: ImagesConfig, strategy: Strategy) -> LargestBatch:
    """Tries batches of pictures of the size of the run.

    Args:
        config: the run; its batch size is where the search begins.
        strategy: the devices.

    Raises:
        DeviceMemoryError: not even one picture a replica fits.
    """
    task = build_images(config)
    steps = CompileConfig(loss=picture_loss, precision=config.precision, clip_norm=config.clip_norm)
    return largest_batch(
        compile_images(config, task, strategy),
        steps,
        task.train.made_up,
        start=config.batch_size,
        examples=task.train.pictures,
    )
