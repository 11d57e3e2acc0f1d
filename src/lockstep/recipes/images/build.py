"""From an ``ImagesConfig`` to the parts of a training run: pictures, module, batches, optimizer.

    pictures -> batches
            \\-> module (as many logits as there are classes)

Everything here is plain PyTorch: nothing knows how many replicas there will be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.extras import require
from lockstep.recipes.images.batches import BatchSettings, PictureBatches
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.model import PictureClassifier, new_mobilenet
from lockstep.recipes.images.source import BrokenPicture, PictureSource, read_pictures


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
        broken: pictures that were skipped.
    """

    module: PictureClassifier
    train: PictureBatches
    valid: PictureBatches | tuple[()]
    test: PictureBatches
    classes: tuple[str, ...]
    source: str
    broken: tuple[BrokenPicture, ...]


def build_images(config: ImagesConfig) -> ImagesTask:
    """Finds and decodes the pictures, once, and makes or loads the module.

    Raises:
        DataError: the pictures cannot be used.
        ConfigError: the pretrained model cannot be used.
    """
    pictures = read_pictures(config)
    return ImagesTask(
        module=_module(config, pictures.classes),
        train=_batches(pictures, "train", config),
        valid=_batches(pictures, "valid", config) if pictures.parts["valid"].rows else (),
        test=_batches(pictures, "test", config),
        classes=pictures.classes,
        source=pictures.source,
        broken=pictures.broken,
    )


def build_optimizer(config: ImagesConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at a constant rate, fused: one pass over each weight."""
    return torch.optim.Adam(parameters, lr=config.learning_rate, fused=True)


def build_metrics() -> dict[str, Any]:
    """Name -> torchmetrics Metric: the part of the pictures whose likeliest class is right."""
    classification = require("torchmetrics.classification", "images")
    return {"accuracy": classification.MulticlassAccuracy(num_classes=None, average="micro")}


def picture_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each picture, [rows] float32: logits [rows, classes], labels [rows] int64."""
    return nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def _module(config: ImagesConfig, classes: tuple[str, ...]) -> PictureClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return new_mobilenet(config.shape, classes)


def _batches(pictures: PictureSource, part: str, config: ImagesConfig) -> PictureBatches:
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
    return PictureBatches(pictures.pixels, chosen.rows, chosen.labels, settings=settings)
