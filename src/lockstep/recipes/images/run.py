"""Runs the recipe ``images`` on a strategy: training with validation, then the test.

What a command calls. It prints nothing itself; the weights and what belongs to them are written at the end, if asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.recipes.images.build import (
    ImagesTask,
    build_images,
    build_metrics,
    build_optimizer,
    picture_loss,
    settings_of,
)
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.pixels import Progress
from lockstep.recipes.images.pretrained import save_mobilenet
from lockstep.recipes.images.source import BrokenPicture
from lockstep.recipes.same_run import SameRun
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model


@dataclass(frozen=True, kw_only=True)
class ImagesResult:
    """What a run came to.

    Args:
        history: the logs and times of the epochs.
        test_metrics: loss and accuracy over the test part.
        source: where the pictures came from.
        pictures: part -> how many it has, without the broken ones.
        kept: where the decoded pictures were and how much room they took, in words for a person.
        parameters: of the whole model, head included.
        classes: their names.
        broken: pictures that were skipped.
    """

    history: History
    test_metrics: dict[str, float]
    source: str
    pictures: dict[str, int]
    kept: str
    parameters: int
    classes: tuple[str, ...]
    broken: tuple[BrokenPicture, ...]


def train_images(
    config: ImagesConfig,
    strategy: Strategy,
    *,
    callbacks: Sequence[Callback] = (),
    log_dir: Path | None = None,
    output_dir: Path | None = None,
    verbose: Verbose = 1,
    progress: Progress | None = None,
) -> ImagesResult:
    """Trains and validates epoch by epoch, then tests. Every worker must call it.

    With a ``BackupAndRestore`` among the callbacks, a run that was interrupted goes on where it stopped.

    Args:
        config: the run.
        strategy: the devices.
        callbacks: called before those of the recipe: early stopping and TensorBoard.
        log_dir: folder of the TensorBoard logs; None writes none.
        output_dir: folder that gets weights, config and class names at the end, as transformers reads them; None
            writes none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.
        progress: told how many files are decoded, of how many.

    Raises:
        CheckpointError: a backup of a run with other settings.
    """
    task = build_images(config, progress=progress)
    model = compile_images(config, task, strategy)
    same = SameRun(partial(settings_of, config, task.pictures))
    hooks = [*callbacks, same, *_own_callbacks(config, task, log_dir)]
    history = model.fit(task.train, task.valid or None, epochs=config.epochs, callbacks=hooks, verbose=verbose)
    test_metrics = model.evaluate(task.test, verbose=0)
    if output_dir is not None:
        save_mobilenet(model, task.module, output_dir, pixel_range=config.pixel_range)
    return ImagesResult(
        history=history,
        test_metrics=test_metrics,
        source=task.source,
        pictures={part: len(chosen.rows) for part, chosen in task.pictures.parts.items()},
        kept=task.pictures.store.kept,
        parameters=sum(parameter.numel() for parameter in task.module.parameters()),
        classes=task.classes,
        broken=task.pictures.broken,
    )


def compile_images(config: ImagesConfig, task: ImagesTask, strategy: Strategy) -> Model:
    """A Model of the task's module on the strategy, ready for fit."""
    with strategy.scope():
        model = Model(task.module, sync_batchnorm=config.sync_batchnorm)
        model.compile(
            optimizer=partial(build_optimizer, config),
            loss=picture_loss,
            metrics=build_metrics(),
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
        )
    return model


def _own_callbacks(config: ImagesConfig, task: ImagesTask, log_dir: Path | None) -> list[Callback]:
    watched = "val_loss" if task.valid else "loss"
    stopping = [EarlyStopping(watched, patience=config.patience)] if config.patience else []
    return [*stopping, *([TensorBoard(log_dir)] if log_dir is not None else [])]
