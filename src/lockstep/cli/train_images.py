"""``lockstep train images``: MobileNetV2 learns to tell classes of pictures apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.cli.backup import BackupFlag, BackupPlan, ResumeFlag
from lockstep.cli.decoding import decoding_bar
from lockstep.cli.devices import DevicesFlag
from lockstep.cli.training import (
    CheckFlag,
    OutputFlag,
    QuietFlag,
    Trained,
    TrainingCommand,
    TrainingFlags,
    TrainingJob,
    counted,
)
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.train import ImagesResult, check_exactness, train_images
from lockstep.strategies.base import Strategy
from lockstep.train.fit import Verbose

IMAGES_EXAMPLE = "Example: lockstep train images --devices cpu:2 --data flower_photos --size 96 --output runs/flowers"


def images(
    *,
    config: ImagesConfig,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/images"),
    resume: ResumeFlag = False,
    backup: BackupFlag = "epoch",
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> TrainingCommand:
    """Train MobileNetV2 on pictures, one folder for each class, or on scikit-learn's handwritten digits."""
    plan = BackupPlan(often=backup, resume=resume)
    job = TrainingJob(
        title="MobileNetV2",
        work=_work(config),
        seed=config.seed,
        train=_Run(config=config, backup=plan).train,
        check=partial(check_exactness, config),
        backup=plan,
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet)
    return TrainingCommand(job=job, flags=flags)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What was asked for.

    Args:
        config: the run.
        backup: what an interrupted run leaves, and whether this one goes on from it.
    """

    config: ImagesConfig
    backup: BackupPlan

    def train(self, strategy: Strategy, logs: Path, model: Path, verbose: Verbose) -> Trained:
        """Trains, and gives what is reported."""
        with decoding_bar(quiet=verbose == 0) as progress:
            result = train_images(
                self.config,
                strategy,
                callbacks=self.backup.callbacks(model.parent),
                log_dir=logs,
                output_dir=model,
                verbose=verbose,
                progress=progress,
            )
        return Trained(
            history=result.history,
            test_metrics=result.test_metrics,
            size=f"{result.parameters:,} parameters, {len(result.classes)} classes",
            notes=[f"data    {_data(result)}"],
        )


def _data(result: ImagesResult) -> str:
    counts = ", ".join(f"{part} {number:,}" for part, number in result.num_images.items())
    skipped = f"; {counted(len(result.broken), 'broken picture')} skipped" if result.broken else ""
    return f"{result.source}: {counts} pictures{skipped}; {result.decoded}"


def _work(config: ImagesConfig) -> str:
    pictures = "scikit-learn's digits" if config.data is None else str(config.data)
    batches = f"global batches of {counted(config.batch_size, 'picture')}"
    return (
        f"{pictures} at {config.size}x{config.size}, {batches}, {counted(config.epochs, 'epoch')}, {config.precision}"
    )
