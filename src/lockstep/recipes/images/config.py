"""The configuration of the recipe ``images``: MobileNetV2 learns to classify images.

The published runs have 224x224 pixels, 64 images per replica, 5 epochs, a shuffle buffer of 1024 and no early stopping.
Adam at 1e-3, pixels from 0 to 1 and no augmentation are the same here.

The other defaults are for the digits on a small machine. Test accuracy on one core (seconds of that core per epoch):
32x32 with output stride 32 and a batch norm momentum of 0.2 reaches 0.83 in the second epoch and 0.91 to 0.95 from the
fifth to the fifteenth (2.1 s). A momentum of 0.1, the default of torch, is too slow for 52 batch norms and 20 steps per
epoch (0.20 in the third epoch, 0.91 in the eighth). Stride 16 is no better (0.87 to 0.94, 3.7 s). shift=0.1 adds about
0.01 (0.92 to 0.96 from the tenth epoch on). Batches of 32 add nothing (3.2 s).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.recipes.config_checks import at_least_each, between, check_common, fraction, positive, probability

PixelRange = Literal["unit", "centred"]
_MAX_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Everything that a run of the recipe depends on, except the devices.

    Args:
        data: folder with one folder of images per class, or with train/ and test/ of such folders; default:
            scikit-learn's handwritten digits.
        test_fraction: fraction of each class that is held out for the test if the data has no test/.
        valid_fraction: fraction of each class that is held out for validation if the data has no valid/; 0 holds out
            none.
        size: side in pixels of the square to which images are resized; published runs have 224.
        pixel_range: "unit" scales pixels to 0 to 1, as published; "centred" to -1 to 1, as Google's pretrained weights
            expect.
        max_broken: fraction of the images that may be broken and are skipped; more is an error.
        workers: processes that decode images; default: one per core; 0 decodes in the main process.
        cache: keep decoded images in memory for this run, or on disk for later runs too.
        cache_dir: folder for images that are cached on disk.
        flip: mirror half of the training images.
        shift: maximum random shift of training images, as a fraction of their side; edge pixels are repeated.
        pretrained: folder or Hugging Face name of a MobileNetV2 to start from.
        hidden: width of a hidden layer between the pooled features and the classes; 0 for none.
        width_multiplier: factor for the width of all layers.
        output_stride: ratio of image size to the size of the last feature map; 8, 16 or 32.
        dropout: dropout probability of the pooled features.
        batch_norm_momentum: weight of a new batch in the running statistics of batch norm.
        sync_batchnorm: compute batch norm statistics over the global batch instead of each replica's shard.
        batch_size: images in a global batch.
        shuffle_buffer: images that are shuffled together, as by tf.data; 0 shuffles all. Published runs have 1024.
        epochs: passes over the training images.
        learning_rate: constant learning rate of Adam.
        patience: epochs without a lower validation loss before training stops; 0 never stops early.
        precision: precision of the forward and backward pass.
        accumulate: global batches per update.
        clip_norm: maximum norm of the gradients; default: no clipping.
        seed: seed of weights, order, augmentation and dropout.
    """

    data: Path | None = None
    test_fraction: float = 0.1
    valid_fraction: float = 0.1
    size: int = 32
    pixel_range: PixelRange = "unit"
    max_broken: float = 0.05
    workers: int | None = None
    cache: Literal["memory", "disk"] = "memory"
    cache_dir: Path = Path("~/.cache/lockstep")
    flip: bool = False
    shift: float = 0.0
    pretrained: str | None = None
    hidden: int = 0
    width_multiplier: float = 1.0
    output_stride: int = 32
    dropout: float = 0.0
    batch_norm_momentum: float = 0.2
    sync_batchnorm: bool = False
    batch_size: int = 64
    shuffle_buffer: int = 0
    epochs: int = 15
    learning_rate: float = 1e-3
    patience: int = 5
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self)
        at_least_each(self, 1, "batch_size")
        at_least_each(self, 0, "patience", "shuffle_buffer")
        if self.workers is not None:
            between("workers", self.workers, 0, 256)
        positive("clip_norm", self.clip_norm)
        fraction("test_fraction", self.test_fraction, most=0.9, above_zero=True)
        fraction("valid_fraction", self.valid_fraction, most=0.9)
        fraction("max_broken", self.max_broken, most=1.0)
        fraction("shift", self.shift, most=0.5)
        probability("dropout", self.dropout)
        self._check_model()

    def _check_model(self) -> None:
        if self.output_stride not in (8, 16, 32):
            raise ConfigError(f"output_stride={self.output_stride} was given; choose one of 8, 16 or 32")
        if not self.output_stride <= self.size <= _MAX_SIZE:
            raise ConfigError(
                f"size={self.size} was given, expected {self.output_stride} to {_MAX_SIZE} pixels: the last feature"
                f" map is output_stride={self.output_stride} times smaller; give a larger size"
            )
        if not 0 <= self.hidden <= 2**16:
            raise ConfigError(f"hidden={self.hidden} was given, expected from 0 (no hidden layer) to {2**16}; try 512")
        for name, most in (("width_multiplier", 8), ("batch_norm_momentum", 1)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected above 0 and up to {most}")

    @property
    def num_workers(self) -> int:
        """The number of processes that decode images."""
        return len(os.sched_getaffinity(0)) if self.workers is None else self.workers


def images(*, data: Path | None = None) -> ImagesConfig:
    """Returns the complete configuration: MobileNetV2 with random weights.

    Change a setting with ``dataclasses.replace``.

    Args:
        data: folder of class folders; None is scikit-learn's digits.

    Example:
        >>> images().batch_size, images().learning_rate
        (64, 0.001)
    """
    return ImagesConfig(data=data)
