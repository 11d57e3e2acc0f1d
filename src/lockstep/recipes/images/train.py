"""The largest global batch of the recipe ``images`` that fits a strategy's devices."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.extras import require
from lockstep.recipes.batch_size import LargestBatch, largest_batch
from lockstep.recipes.config_checks import SameRun, settings_but
from lockstep.recipes.exactness import Batch, Comparison, ExactnessReport, check_steps
from lockstep.recipes.images.batches import BatchSettings, PictureBatches
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.dataset import BrokenPicture, PictureSource, read_pictures
from lockstep.recipes.images.folder import Part
from lockstep.recipes.images.model import PictureClassifier, load_mobilenet, new_mobilenet, save_mobilenet
from lockstep.recipes.images.pixels import Progress
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.compile import CompileConfig
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model

_NO_MATTER = ("data", "max_broken", "workers", "cache", "cache_dir", "pretrained", "patience")
"""Settings that may change where a run goes on: places, and how the same numbers are computed."""


@dataclass(frozen=True, kw_only=True)
class ImagesTask:
    """The parts of a run.

    Args:
        module: the model, on the CPU.
        train: batches in another order and with other augmentation every epoch.
        valid: batches that stay as they are; an empty tuple where nothing is held out.
        test: batches that stay as they are.
        classes: their names, in the order of the labels and of the logits.
        source: where the pictures came from.
        pictures: all of them decoded, and those that were skipped.
    """

    module: PictureClassifier
    train: PictureBatches
    valid: PictureBatches | tuple[()]
    test: PictureBatches
    classes: tuple[str, ...]
    source: str
    pictures: PictureSource


def build_images(config: ImagesConfig, *, progress: Progress | None = None) -> ImagesTask:
    """Finds and decodes the pictures, once, and makes or loads the module.

    Args:
        config: the run.
        progress: told how many files are decoded, of how many.

    Raises:
        DataError: the pictures cannot be used.
        ConfigError: the pretrained model cannot be used.
    """
    pictures = read_pictures(config, progress=progress)
    return ImagesTask(
        module=_module(config, pictures.classes),
        train=_batches(pictures, "train", config),
        valid=_batches(pictures, "valid", config) if pictures.parts["valid"].rows else (),
        test=_batches(pictures, "test", config),
        classes=pictures.classes,
        source=pictures.source,
        pictures=pictures,
    )


def build_optimizer(config: ImagesConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at a constant rate, fused: one pass over each weight."""
    return torch.optim.Adam(parameters, lr=config.learning_rate, fused=True)


def build_metrics() -> dict[str, Any]:
    """Name -> torchmetrics Metric: the part of the pictures whose likeliest class is right."""
    classification = require("torchmetrics.classification", "images")
    return {"accuracy": classification.MulticlassAccuracy(num_classes=None, average="micro")}


def picture_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each picture, [rows], in float32 or better: logits [rows, classes], labels [rows] int64."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(exact, labels, reduction="none")


def settings_of(config: ImagesConfig, pictures: PictureSource) -> dict[str, Any]:
    """Name -> value of all that the numbers of a run depend on but its devices; of the pictures a hash.

    It is of the pixels, labels and order of what trains and validates: the same pictures may lie elsewhere, be kept
    elsewhere, or have other names.
    """
    digest = hashlib.sha256("\0".join(pictures.classes).encode())
    for part in ("train", "valid"):
        chosen = pictures.parts[part]
        digest.update(f"\0{part} {chosen.labels}".encode())
        for row in chosen.rows:
            digest.update(pictures.store.pixels[row])
    return {**settings_but(config, _NO_MATTER), "pictures": digest.hexdigest()[:16]}


def _module(config: ImagesConfig, classes: tuple[str, ...]) -> PictureClassifier:
    if config.pretrained is not None and config.width_multiplier != ImagesConfig.width_multiplier:
        warnings.warn(
            f"width_multiplier has no effect with pretrained={config.pretrained!r}, which brings its own width",
            stacklevel=3,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.pretrained is None:
            return new_mobilenet(config.shape, classes)
        return load_mobilenet(config.pretrained, config.shape, classes)


def _batches(pictures: PictureSource, part: Part, config: ImagesConfig) -> PictureBatches:
    training = part == "train"
    settings = BatchSettings(
        batch_size=config.batch_size,
        pixel_range=config.pixel_range,
        shuffle=training,
        shuffle_buffer=config.shuffle_buffer,
        flip=config.flip and training,
        shift=config.shift if training else 0.0,
        seed=config.seed,
    )
    chosen = pictures.parts[part]
    return PictureBatches(pictures.store.pixels, chosen.rows, chosen.labels, settings=settings)


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
