"""``lockstep train images``: MobileNetV2 learns to tell classes of pictures apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.cli.devices import DevicesFlag
from lockstep.cli.training import (
    OutputFlag,
    QuietFlag,
    Trained,
    TrainingFlags,
    TrainingJob,
    counted,
    run_training,
)
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.run import train_images
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.model import Verbose

IMAGES_EXAMPLE = "Example: lockstep train images --devices cpu:2 --data flower_photos --size 96 --output runs/flowers"


def images(
    *,
    config: ImagesConfig,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/images"),
    quiet: QuietFlag = False,
) -> Callable[[], int]:
    """Train MobileNetV2 on pictures, one folder for each class, or on scikit-learn's handwritten digits."""
    job = TrainingJob(
        title="MobileNetV2",
        work=_work(config),
        seed=config.seed,
        train=partial(_train, config),
        check=str,
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=False, quiet=quiet)
    return partial(run_training, job, flags)


def _train(config: ImagesConfig, strategy: MirroredStrategy, logs: Path, model: Path, verbose: Verbose) -> Trained:
    result = train_images(config, strategy, log_dir=logs, output_dir=model, verbose=verbose)
    size = f"{result.parameters:,} parameters, {len(result.classes)} classes"
    return Trained(history=result.history, test_metrics=result.test_metrics, size=size)


def _work(config: ImagesConfig) -> str:
    pictures = "scikit-learn's digits" if config.data is None else str(config.data)
    batches = f"global batches of {counted(config.batch_size, 'picture')}"
    return (
        f"{pictures} at {config.size}x{config.size}, {batches}, {counted(config.epochs, 'epoch')}, {config.precision}"
    )
