"""Training of the recipe ``images``: building the parts of a run, training them on a strategy, and checking exactness.

    images -> batches
           -> model (as many logits as classes)

The parts are plain PyTorch: they do not depend on the number of replicas.
"""

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
from lockstep.recipes.config_checks import ResumeCheck, settings_except
from lockstep.recipes.exactness import Batch, Comparison, ExactnessReport, check_steps, train_with_model
from lockstep.recipes.images.batches import BatchSettings, ImageBatches
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.dataset import BrokenImage, ImageDataset, load_images
from lockstep.recipes.images.folder import Split
from lockstep.recipes.images.model import ImageClassifier, load_mobilenet, new_mobilenet, save_mobilenet
from lockstep.recipes.images.pixels import Progress
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback, EarlyStopping, TensorBoard
from lockstep.train.compile import CompileConfig
from lockstep.train.fit import Verbose
from lockstep.train.logs import History
from lockstep.train.model import Model

_MAY_CHANGE = ("data", "max_broken", "workers", "cache", "cache_dir", "pretrained", "patience")
"""Settings that may differ in a resumed run: paths, and how the same numbers are computed."""


@dataclass(frozen=True, kw_only=True)
class ImagesTask:
    """The parts of a run.

    Args:
        module: the model, on the CPU.
        train: training batches, with another order and other augmentation in every epoch.
        valid: validation batches, the same in every epoch; empty if nothing is held out.
        test: test batches.
        dataset: the decoded images.
    """

    module: ImageClassifier
    train: ImageBatches
    valid: ImageBatches | tuple[()]
    test: ImageBatches
    dataset: ImageDataset


def build_images(config: ImagesConfig, *, progress: Progress | None = None) -> ImagesTask:
    """Finds and decodes the images, and makes or loads the model.

    Args:
        config: the configuration of the run.
        progress: called with the number of decoded files and of all files.

    Raises:
        DataError: the images cannot be used.
        ConfigError: the pretrained model cannot be used.
    """
    dataset = load_images(config, progress=progress)
    return ImagesTask(
        module=_model(config, dataset.classes),
        train=_batches(dataset, "train", config),
        valid=_batches(dataset, "valid", config) if dataset.splits["valid"].rows else (),
        test=_batches(dataset, "test", config),
        dataset=dataset,
    )


def build_optimizer(config: ImagesConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns fused Adam with a constant learning rate."""
    return torch.optim.Adam(parameters, lr=config.learning_rate, fused=True)


def build_metrics() -> dict[str, Any]:
    """Returns name -> torchmetrics Metric: the fraction of images whose likeliest class is correct."""
    classification = require("torchmetrics.classification", "images")
    return {"accuracy": classification.MulticlassAccuracy(num_classes=None, average="micro")}


def image_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each image, [rows], in float32 or better.

    Args:
        logits: [rows, classes] float.
        labels: [rows] int64.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, labels, reduction="none")


def run_settings(config: ImagesConfig, dataset: ImageDataset) -> dict[str, Any]:
    """Returns name -> value of everything that the results depend on, except the devices.

    The images are hashed by pixels, labels and order: the same images may be elsewhere or have other names.
    """
    digest = hashlib.sha256("\0".join(dataset.classes).encode())
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        chosen = dataset.splits[split]
        digest.update(f"\0{split} {chosen.labels}".encode())
        for row in chosen.rows:
            digest.update(dataset.store.pixels[row])
    return {**settings_except(config, _MAY_CHANGE), "images": digest.hexdigest()[:16]}


def _model(config: ImagesConfig, classes: tuple[str, ...]) -> ImageClassifier:
    if config.pretrained is not None and config.width_multiplier != ImagesConfig.width_multiplier:
        warnings.warn(
            f"width_multiplier has no effect with pretrained={config.pretrained!r}, which has its own width",
            stacklevel=3,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.pretrained is None:
            return new_mobilenet(config.shape, classes)
        return load_mobilenet(config.pretrained, config.shape, classes)


def _batches(dataset: ImageDataset, split: Split, config: ImagesConfig) -> ImageBatches:
    training = split == "train"
    settings = BatchSettings(
        batch_size=config.batch_size,
        pixel_range=config.pixel_range,
        shuffle=training,
        shuffle_buffer=config.shuffle_buffer,
        flip=config.flip and training,
        shift=config.shift if training else 0.0,
        seed=config.seed,
    )
    chosen = dataset.splits[split]
    return ImageBatches(dataset.store.pixels, chosen.rows, chosen.labels, settings=settings)


@dataclass(frozen=True, kw_only=True)
class ImagesResult:
    """The result of a run.

    Args:
        history: metrics and times of the epochs.
        test_metrics: loss and accuracy over the test split.
        source: where the images come from.
        num_images: split -> number of images, without the broken ones.
        decoded: size and location of the decoded images, for a person to read.
        parameters: number of parameters of the whole model.
        classes: names of the classes.
        broken: images that were skipped.
    """

    history: History
    test_metrics: dict[str, float]
    source: str
    num_images: dict[str, int]
    decoded: str
    parameters: int
    classes: tuple[str, ...]
    broken: tuple[BrokenImage, ...]


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
    """Trains and validates epoch by epoch, then tests. Every worker must call it. It prints nothing but the progress.

    With a ``BackupAndRestore`` among the callbacks, an interrupted run resumes where it stopped.

    Args:
        config: the configuration of the run.
        strategy: the devices.
        callbacks: callbacks that run before those of the recipe, early stopping and TensorBoard.
        log_dir: folder for TensorBoard logs; None writes none.
        output_dir: folder for weights, config and class names at the end, as transformers reads them; None writes none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.
        progress: called with the number of decoded files and of all files.

    Raises:
        CheckpointError: the backup is of a run with other settings.
    """
    task = build_images(config, progress=progress)
    dataset = task.dataset
    model = compile_images(config, task, strategy)
    all_callbacks = [*callbacks, ResumeCheck(partial(run_settings, config, dataset))]
    if config.patience:
        all_callbacks.append(EarlyStopping("val_loss" if task.valid else "loss", patience=config.patience))
    if log_dir is not None:
        all_callbacks.append(TensorBoard(log_dir))
    history = model.fit(task.train, task.valid or None, epochs=config.epochs, callbacks=all_callbacks, verbose=verbose)
    test_metrics = model.evaluate(task.test, verbose=0)
    if output_dir is not None:
        save_mobilenet(model, task.module, output_dir, pixel_range=config.pixel_range)
    return ImagesResult(
        history=history,
        test_metrics=test_metrics,
        source=dataset.source,
        num_images={split: len(chosen.rows) for split, chosen in dataset.splits.items()},
        decoded=dataset.store.description,
        parameters=sum(parameter.numel() for parameter in task.module.parameters()),
        classes=dataset.classes,
        broken=dataset.broken,
    )


def compile_images(config: ImagesConfig, task: ImagesTask, strategy: Strategy) -> Model:
    """Returns a compiled ``Model`` of the task's module on the strategy."""
    with strategy.scope():
        model = Model(task.module, sync_batchnorm=config.sync_batchnorm)
        model.compile(
            optimizer=partial(build_optimizer, config),
            loss=image_loss,
            metrics=build_metrics(),
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
        )
    return model


_EXACT_ROWS = 17  # images per batch: double convolutions take ten times as long; odd, so that shards are uneven


def check_exactness(config: ImagesConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Batch statistics are synchronised and dropout is off: otherwise N replicas differ from one device by definition. The
    check computes in double precision: from random weights of this size and 34 batch norms, one step multiplies
    rounding so much that in float32 the losses of the third step differ by 0.1, in double by 1e-11 (two replicas,
    digits, SGD with 0.1). Every worker must call it.

    Args:
        config: the configuration of the run.
        strategy: the replicas to compare with one device.
        steps: number of global batches, one update each.

    Raises:
        ConfigError: ``steps`` is below 1.
        DataError: the images cannot be used.
    """
    check_steps(steps)
    task = build_images(replace(config, dropout=0.0))
    task.module.double()
    first = islice(task.train, steps)
    batches = tuple((images[:_EXACT_ROWS].double(), labels[:_EXACT_ROWS]) for images, labels in first)
    comparison = Comparison(
        module=task.module,
        batches=batches,
        train=partial(train_with_model, batches=batches, loss=image_loss, strategy=strategy, sync_batchnorm=True),
        plain_loss=_plain_loss,
    )
    condition = "double precision, batch statistics synchronised, no dropout"
    return comparison.report(strategy, partial(build_optimizer, config), condition=condition)


def _plain_loss(module: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(module(images), labels)


def largest_images_batch(config: ImagesConfig, strategy: Strategy) -> LargestBatch:
    """Finds the largest global batch that fits.

    Args:
        config: the configuration of the run; the search begins with its batch size.
        strategy: the devices.

    Raises:
        DeviceMemoryError: not even one image per replica fits.
    """
    task = build_images(config)
    return largest_batch(
        compile_images(config, task, strategy),
        CompileConfig(loss=image_loss, precision=config.precision, clip_norm=config.clip_norm),
        task.train.dummy_batch,
        start=config.batch_size,
        examples=task.train.num_images,
    )
