"""From an ``ImagesConfig`` to the parts of a training run: pictures, module, batches, optimizer.

    pictures -> batches
            \\-> module (as many logits as there are classes)

Everything here is plain PyTorch: nothing knows how many replicas there will be.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.extras import require
from lockstep.recipes.images.batches import BatchSettings, PictureBatches
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.model import PictureClassifier, new_mobilenet
from lockstep.recipes.images.pixels import Progress
from lockstep.recipes.images.pretrained import load_mobilenet
from lockstep.recipes.images.scan import Part
from lockstep.recipes.images.source import PictureSource, read_pictures
from lockstep.recipes.same_run import settings_but

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
