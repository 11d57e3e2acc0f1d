"""Training of the recipe ``images``: building the parts of a run, training them on a strategy, and checking exactness.

images -> batches
       -> model (as many logits as classes)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.collectives.communicator import Communicator
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback
from lockstep.train.classification import Accuracy
from lockstep.train.fit import Verbose
from lockstep_tools.recipes import training
from lockstep_tools.recipes.exactness import ExactnessReport, compare
from lockstep_tools.recipes.from_hub import warn_of_ignored
from lockstep_tools.recipes.images.batches import ImageBatches
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import ImageDataset, load_images
from lockstep_tools.recipes.images.model import ImageClassifier, new_mobilenet, save_classifier
from lockstep_tools.recipes.images.pretrained import PretrainedClassifier, load_classifier, preparation_of
from lockstep_tools.recipes.images.split_folders import Split
from lockstep_tools.recipes.images.statistics import FreshStatistics, statistics_lag

_MAY_CHANGE = ("data", "pretrained", "workers", "patience", "patience_updates")
"""Settings that may differ in a resumed run: paths, and how the same numbers are computed."""
_EXACT_ROWS = 17
"""Images per batch of the exactness check: double convolutions take ten times as long; odd, for uneven shards."""


@dataclass(frozen=True, kw_only=True)
class ImagesTask(training.Task):
    """The parts of a run, and the decoded images."""

    dataset: ImageDataset


def build_images(
    config: ImagesConfig,
    dataset: ImageDataset | None = None,
    *,
    workers: Communicator | None = None,
    skipped_file: Path | None = None,
    show_progress: bool = False,
) -> ImagesTask:
    """Finds and decodes the images (unless they are given), and makes the model. Every worker must call it.

    Raises a DataError if the images cannot be used.
    """
    if config.pretrained is not None:
        warn_of_ignored(config, ("hidden", "width_multiplier", "output_stride"))
        config = replace(config, size=config.size or preparation_of(config.pretrained).size)
    if dataset is None:
        dataset = load_images(config, workers=workers, skipped_file=skipped_file, show_progress=show_progress)
    # The weights depend on the config's seed alone, and the caller's random numbers go on as before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = _new_module(config, dataset.classes)

    def batches(split: Split) -> ImageBatches:
        return ImageBatches(dataset.splits[split], config, training=split == "train")

    return ImagesTask(
        source=dataset.source,
        config=config,
        module=module,
        parameters=training.num_parameters(module),
        train=batches("train"),
        valid=batches("valid") if dataset.splits["valid"].labels else (),
        test=batches("test"),
        loss=image_loss,
        optimizer=partial(build_optimizer, config),
        metrics=build_metrics(),
        sync_batchnorm=config.sync_batchnorm,
        callbacks=_callbacks(config, module, dataset),
        settings=partial(run_settings, config, dataset),
        dataset=dataset,
    )


def _new_module(config: ImagesConfig, classes: Sequence[str]) -> ImageClassifier | PretrainedClassifier:
    if config.pretrained is None:
        return new_mobilenet(config, classes)
    momentum = config.batch_norm_momentum
    return load_classifier(config.pretrained, classes, batch_norm_momentum=momentum, size=config.size)


def _callbacks(config: ImagesConfig, module: nn.Module, dataset: ImageDataset) -> tuple[Callback, ...]:
    # All images are shuffled together, whatever the buffer: a batch of one class would have statistics of its own.
    # They are not changed at random either, as the images of the validation are not.
    settings = replace(config, shuffle_buffer=0, batch_size=max(2, config.batch_size), augment="none")
    batches = ImageBatches(dataset.splits["train"], settings, training=True)
    return (FreshStatistics(module, batches),) if statistics_lag(len(batches), config.batch_norm_momentum) else ()


def build_optimizer(config: ImagesConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns fused Adam with a constant learning rate."""
    return torch.optim.Adam(parameters, lr=config.learning_rate, fused=True)


def build_metrics() -> dict[str, Any]:
    """Returns name -> metric: the fraction of images whose likeliest class is correct."""
    return {"accuracy": Accuracy("classes")}


def image_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each image, [rows], in float32 or better, of logits [rows, classes]."""
    # Under autocast logits are of half precision, which has three digits; double stays double for the exactness check.
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, labels, reduction="none")


def run_settings(config: ImagesConfig, dataset: ImageDataset) -> dict[str, Any]:
    """Returns name -> value of everything that the results depend on, except the devices.

    The images are hashed by pixels, labels and order: the same images may be elsewhere or have other names.
    """
    digest = hashlib.sha256("\0".join(dataset.classes).encode())
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        digest.update(f"\0{split} {dataset.splits[split].labels}".encode())
        pixels: Any = dataset.splits[split].pixels.numpy()
        digest.update(pixels)
    return {**training.settings_except(config, _MAY_CHANGE), "images": digest.hexdigest()[:16]}


@dataclass(frozen=True, kw_only=True)
class ImagesResult(training.Result):
    """The result of a run; how many images each split has, and path -> reason of the broken ones.

    ``config`` has the size of the images filled in. ``only_trained`` and ``loose`` are as in ``ImageDataset``.
    """

    config: ImagesConfig
    num_images: dict[str, int]
    classes: tuple[str, ...]
    broken: Mapping[Path, str]
    only_trained: tuple[str, ...] = ()
    loose: int = 0


def train_images(
    config: ImagesConfig,
    strategy: Strategy,
    *,
    callbacks: Sequence[Callback] = (),
    log_dir: Path | None = None,
    output_dir: Path | None = None,
    skipped_file: Path | None = None,
    verbose: Verbose = 1,
    choose_batch_size: training.ChooseBatchSize | None = None,
) -> ImagesResult:
    """Trains and validates epoch by epoch, then tests. Every worker must call it. It prints nothing but the progress.

    With a ``BackupAndRestore`` among the callbacks, an interrupted run resumes where it stopped.

    Args:
        config: the configuration of the run.
        strategy: the devices.
        callbacks: callbacks that run before those of the recipe, early stopping and TensorBoard.
        log_dir: folder for TensorBoard logs; None writes none.
        output_dir: folder for weights, config and class names at the end, as transformers reads them; None writes none.
        skipped_file: file that lists the images that cannot be read, a line each: the path, a tab and the reason. It is
            written before the training, also if they are too many to train. None, or no such image, writes none.
        verbose: 0 silent, 1 a live line per epoch, 2 a plain line per epoch.
        choose_batch_size: chooses another batch size than the config's, before the training.

    Raises:
        CheckpointError: the backup is of a run with other settings.
        DataError: the images cannot be used, or more than a twentieth of them cannot be read.
    """
    task = build_images(config, workers=strategy.workers, skipped_file=skipped_file, show_progress=verbose == 1)
    if choose_batch_size is not None:
        config = training.with_batch_size(config, task, strategy, choose_batch_size)
        task = build_images(config, task.dataset)
    dataset, model = task.dataset, training.compile_task(task, strategy)
    result = training.fit_and_test(task, model, callbacks=callbacks, log_dir=log_dir, verbose=verbose)
    if output_dir is not None:
        save_classifier(model, task.module, output_dir)
    return ImagesResult(
        **vars(result),
        config=task.config,
        num_images={split: len(images.labels) for split, images in dataset.splits.items()},
        classes=dataset.classes,
        broken=dataset.broken,
        only_trained=dataset.only_trained,
        loose=dataset.loose,
    )


def check_exactness(config: ImagesConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the strategy and again without it, from the same weights on the same batches.

    Batch statistics are synchronised: otherwise N replicas differ from one device by definition. The check computes in
    double precision: from random weights of this size and 34 batch norms, one step multiplies rounding so much that in
    float32 the losses of the third step differ by 0.1, in double by 1e-11 (two replicas, digits, SGD with 0.1). Every
    worker must call it. ``steps`` are global batches, one update each.
    """
    task = build_images(replace(config, sync_batchnorm=True), workers=strategy.workers)
    task.module.double()
    first = islice(task.train, steps)
    batches = tuple((images[:_EXACT_ROWS].double(), labels[:_EXACT_ROWS]) for images, labels in first)
    return compare(task, strategy, batches, _plain_loss, "double precision, batch statistics synchronised")


def _plain_loss(module: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(module(images), labels)
