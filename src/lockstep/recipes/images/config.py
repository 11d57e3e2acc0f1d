"""The recipe ``images``: MobileNetV2 learns to tell classes of pictures apart.

``images()`` returns the whole configuration; ``build`` turns it into a module, data and an optimizer, and ``run``
trains it. The published runs are 224x224, 64 pictures a replica, 5 epochs, a shuffle buffer of 1024 and no early
stopping; Adam at 1e-3, pixels from 0 to 1 and no augmentation are theirs here too.

The other defaults are for the digits on a small machine. Measured there, test accuracy after each epoch on one core
(seconds of that core an epoch): 32x32 with output stride 32 and a batch norm momentum of 0.2 reaches 0.83 in the
second epoch and 0.91 to 0.95 from the fifth to the fifteenth (2.1); 0.1, torch's own, follows a net of 52 batch norms
too slowly where an epoch has 20 steps (0.20 in the third epoch, 0.91 in the eighth); stride 16 is no better (0.87 to
0.94, 3.7); shift=0.1 adds about 0.01 (0.92 to 0.96 from the tenth on); batches of 32 add nothing (3.2).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.recipes.config_checks import at_least, between, one_of, positive, share
from lockstep.recipes.images.model import MobileNetShape


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Everything that a run of the recipe depends on, but the devices.

    Args:
        data: folder with one folder of pictures for each class, or with train/ and test/ of such folders; without it,
            scikit-learn's handwritten digits.
        test_share: part of each class that is held out for the test where the data has no test/.
        valid_share: part of each class of the training part that validates where the data has no valid/; 0 is none.
        size: side of the square that every picture is resized to, in pixels; published runs have 224.
        pixel_range: "unit" gives the model pixels from 0 to 1, as published; "centred" from -1 to 1, as Google's
            pretrained weights expect.
        max_broken: part of the pictures that may be broken and are then skipped; more is an error.
        workers: processes that decode pictures; by default one for each core, 0 decodes in this process.
        cache: where decoded pictures are kept: in memory for this run, or on disk for the next ones too.
        cache_dir: folder of the pictures kept on disk.
        flip: mirror half of the training pictures, others in every epoch.
        shift: training pictures are moved at random by up to this part of their side; the edges are repeated.
        pretrained: folder or Hugging Face name of a MobileNetV2 to begin with.
        hidden: width of a layer with ReLU between the pooled features and the classes; 0 is none.
        width_multiplier: makes every layer of the model narrower or wider.
        output_stride: how many times smaller the last feature map is than the picture: 8, 16 or 32.
        dropout: probability, for the pooled features.
        batch_norm_momentum: weight of a new batch in the running statistics of batch norm.
        sync_batchnorm: take the statistics of batch norm over the global batch instead of each replica's shard.
        batch_size: pictures in a global batch.
        shuffle_buffer: pictures that are shuffled together, as by tf.data; 0 shuffles all. Published runs have 1024.
        epochs: passes over the training pictures.
        learning_rate: of Adam, constant.
        patience: epochs without a better validation loss before training stops; 0 never stops early.
        precision: of the forward and backward pass; weights stay in fp32.
        accumulate: global batches per update.
        clip_norm: largest norm of the gradients of an update; by default they are not clipped.
        seed: of everything drawn: weights, order, augmentation, dropout.
    """

    data: Path | None = None
    test_share: float = 0.1
    valid_share: float = 0.1
    size: int = 32
    pixel_range: Literal["unit", "centred"] = "unit"
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
        for name in ("batch_size", "epochs", "accumulate"):
            at_least(name, getattr(self, name), 1)
        for name in ("patience", "shuffle_buffer"):
            at_least(name, getattr(self, name), 0)
        if self.workers is not None:
            between("workers", self.workers, 0, 256)
        between("seed", self.seed, 0, 2**32 - 1)  # torch and the data's generators take no more than 64 bits
        one_of("pixel_range", self.pixel_range, ("unit", "centred"))
        one_of("cache", self.cache, ("memory", "disk"))
        one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        for name in ("learning_rate", "clip_norm"):
            positive(name, getattr(self, name))
        share("test_share", self.test_share, most=0.9, open_below=True)
        share("valid_share", self.valid_share, most=0.9)
        share("max_broken", self.max_broken, most=1.0)
        share("shift", self.shift, most=0.5)
        _ = self.shape  # holds the rest of the rules; making it here makes a bad value fail now rather than at its use

    @property
    def shape(self) -> MobileNetShape:
        """The size of the model."""
        return MobileNetShape(
            size=self.size,
            hidden=self.hidden,
            width_multiplier=self.width_multiplier,
            output_stride=self.output_stride,
            dropout=self.dropout,
            batch_norm_momentum=self.batch_norm_momentum,
        )

    @property
    def decoders(self) -> int:
        """Processes that decode pictures."""
        return len(os.sched_getaffinity(0)) if self.workers is None else self.workers


def images(*, data: Path | None = None) -> ImagesConfig:
    """The recipe: MobileNetV2 of random weights, with nothing left to fill in.

    Change a setting with ``dataclasses.replace``.

    Args:
        data: folder of class folders; None is scikit-learn's digits.

    Example:
        >>> images().batch_size, images().learning_rate
        (64, 0.001)
    """
    return ImagesConfig(data=data)
