"""The configuration of the recipe ``images``: MobileNetV2 learns to classify images.

The published runs have 224x224 pixels, 64 images per replica, 5 epochs, a shuffle buffer of 1024 and no early stopping.
Adam at 1e-3, pixels from 0 to 1 and no random changes of the images are the same here.

The other defaults are for the digits on a small machine. Test accuracy on one core (seconds of that core per epoch):
32x32 with output stride 32 and a batch norm momentum of 0.2 reaches 0.83 in the second epoch and 0.91 to 0.95 from the
fifth to the fifteenth (2.1 s). A momentum of 0.1, the default of torch, is too slow for 52 batch norms and 20 steps per
epoch (0.20 in the third epoch, 0.91 in the eighth). Stride 16 is no better (0.87 to 0.94, 3.7 s). Five epochs of
patience are 105 updates of the digits; 80 is the least of smaller data sets.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checks import ABOVE_ZERO, UNBOUNDED, check_settings
from lockstep.errors import ConfigError

_USUAL_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Everything that a run of the recipe depends on, except the devices.

    Args:
        data: folder with one folder of images per class, or with train/ and test/ of such folders; default:
            scikit-learn's handwritten digits.
        test_fraction: fraction of each class that is held out for the test if the data has no test/.
        valid_fraction: fraction of each class that is held out for validation if the data has no valid/; 0 holds out
            none.
        size: side in pixels of the square to which images are resized; published runs have 224. Default: 32, or the
            pretrained model's own.
        workers: processes that decode images; default: one per core; 0 decodes in the main process.
        augment: random changes of the training images: crop (with contrast and brightness), the same and mirror images,
            or none. Small sets need them; mirror images of digits and letters are wrong.
        pretrained: folder or Hugging Face name of an image classifier to start from, also of timm
            (timm/mobilenetv2_100.ra_in1k); it has its own layers, size and normalization, and gets a new head.
        hidden: width of a hidden layer between the pooled features and the classes; 0 for none.
        width_multiplier: factor for the width of all layers.
        output_stride: ratio of image size to the size of the last feature map; 8, 16 or 32.
        batch_norm_momentum: weight of a new batch in the running statistics of batch norm.
        sync_batchnorm: compute batch norm statistics over the global batch instead of each replica's shard.
        batch_size: images in a global batch.
        shuffle_buffer: images that are shuffled together, as by tf.data; 0 shuffles all. Published runs have 1024.
        epochs: passes over the training images.
        learning_rate: constant learning rate of Adam.
        patience: epochs without a lower validation loss before training stops, and the weights of the best epoch are
            restored; 0 never stops early and keeps the last epoch.
        patience_updates: the same in updates, if they are more; 0 counts epochs alone.
        precision: precision of the forward and backward pass.
        accumulate: global batches per update.
        clip_norm: maximum norm of the gradients; default: no clipping.
        seed: seed of weights and order.
    """

    data: Path | None = None
    test_fraction: float = 0.1
    valid_fraction: float = 0.1
    size: int | None = None
    workers: int | None = None
    augment: Literal["none", "crop", "crop-mirror"] = "none"
    pretrained: str | None = None
    hidden: int = 0
    width_multiplier: float = 1.0
    output_stride: int = 32
    batch_norm_momentum: float = 0.2
    sync_batchnorm: bool = False
    batch_size: int = 64
    shuffle_buffer: int = 0
    epochs: int = 15
    learning_rate: float = 1e-3
    patience: int = 5
    patience_updates: int = 80
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size is None and self.pretrained is None:
            object.__setattr__(self, "size", _USUAL_SIZE)  # so that records of the run have it
        if self.output_stride not in (8, 16, 32):
            raise ConfigError(f"output_stride={self.output_stride} was given; choose one of 8, 16 or 32")
        check_settings(
            self,
            test_fraction=(ABOVE_ZERO, 0.9),
            valid_fraction=(0, 0.9),
            size=(self.output_stride, 4096),  # the last feature map is output_stride times smaller
            workers=(0, 256),
            hidden=(0, 2**16),
            width_multiplier=(ABOVE_ZERO, 8),
            batch_norm_momentum=(ABOVE_ZERO, 1),
            batch_size=(1, UNBOUNDED),
            shuffle_buffer=(0, UNBOUNDED),
            patience=(0, UNBOUNDED),
            patience_updates=(0, UNBOUNDED),
            clip_norm=(ABOVE_ZERO, UNBOUNDED),
        )

    @property
    def side(self) -> int:
        """The side in pixels of the images; ``_USUAL_SIZE`` as long as that of a pretrained model is not known."""
        return self.size or _USUAL_SIZE

    @property
    def num_workers(self) -> int:
        return len(os.sched_getaffinity(0)) if self.workers is None else self.workers
