"""Global batches of images: shuffled anew in every epoch, or fixed.

The order depends on (seed, epoch) and the random changes of the images on (seed, epoch, batch) alone, so an epoch can
be repeated on any number of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep_tools.recipes.images.augmentation import augment
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import LabelledPixels
from lockstep_tools.recipes.shuffling import seeded_generator, shuffled_order


class ImageBatches:
    """The global batches of an epoch, as items (x, y) of a ``Model``'s data.

    x holds images [rows, 3, size, size] float32 (channels last in memory, as CPU convolutions prefer), y labels [rows]
    int64; both are on the CPU. In ``training`` the images are shuffled, and changed at random if the config says so.
    """

    may_be_read_ahead = True  # order and changes come from generators of their own

    def __init__(self, images: LabelledPixels, config: ImagesConfig, *, training: bool) -> None:
        self._pixels, self._labels = images.pixels, torch.tensor(images.labels, dtype=torch.int64)
        self._config, self._training = config, training
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, counted from 0, whose order the next iteration draws."""
        self._epoch = epoch

    @property
    def num_rows(self) -> int:
        return len(self._labels)

    def longest(self, rows: int) -> tuple[Tensor, Tensor]:
        """Returns a batch of the first images, as many as there are up to ``rows``; all are equally large."""
        return to_float(self._pixels[:rows]), self._labels[:rows]

    def __len__(self) -> int:
        return math.ceil(len(self._labels) / self._config.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order, epoch = torch.arange(len(self._labels)), self._epoch
        if self._training:
            generator = seeded_generator(self._config.seed, epoch)
            order = shuffled_order(len(order), buffer=self._config.shuffle_buffer, generator=generator)
        for batch, rows in enumerate(torch.split(order, self._config.batch_size)):
            # Pixels are kept as bytes and made floats batch by batch, in a quarter of the memory.
            images = to_float(self._pixels[rows])
            if self._training and self._config.augment != "none":
                generator = seeded_generator(self._config.seed, epoch, batch)
                images = augment(images, mirror=self._config.augment == "crop-mirror", generator=generator)
            yield images, self._labels[rows]


def to_float(pixels: Tensor) -> Tensor:
    """Converts [rows, size, size, 3] uint8 to [rows, 3, size, size] float32 from 0 to 1."""
    return pixels.permute(0, 3, 1, 2).float().div_(255)
