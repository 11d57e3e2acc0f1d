"""Global batches of images: shuffled and augmented anew in every epoch, or fixed.

    pixels [images, size, size, 3] uint8 -> chosen rows -> flipped, shifted -> [rows, 3, size, size] float32

All random numbers depend on (seed, epoch, batch) alone, so an epoch can be repeated, on any number of replicas and with
any number of decoding processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.recipes.images.config import ImagesConfig, PixelRange
from lockstep.recipes.shuffling import seeded_generator, shuffled_order


class ImageBatches:
    """The global batches of an epoch, as items (x, y) of a ``Model``'s data.

    x holds images [rows, 3, size, size] float32 (channels last in memory, as CPU convolutions prefer), y labels [rows]
    int64; both are on the CPU. ``rows`` of the array ``pixels`` [images, size, size, 3] uint8 have these ``labels``; in
    ``training`` they are shuffled and augmented.
    """

    def __init__(
        self, pixels: Any, rows: Sequence[int], labels: Sequence[int], config: ImagesConfig, *, training: bool
    ) -> None:
        self._pixels = pixels
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._labels = torch.tensor(labels, dtype=torch.int64)
        self._config, self._training = config, training
        self._epoch = 0

    @property
    def num_rows(self) -> int:
        """The number of images in an epoch."""
        return len(self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, counted from 0, whose order and augmentation the next iteration draws."""
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._config.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        config, epoch, order = self._config, self._epoch, torch.arange(len(self._rows))
        if self._training:
            generator = seeded_generator(config.seed, epoch)
            order = shuffled_order(len(order), buffer=config.shuffle_buffer, generator=generator)
        for number, chosen in enumerate(torch.split(order, config.batch_size)):
            pixels = torch.from_numpy(self._pixels[self._rows[chosen].numpy()])
            if self._training:
                generator = seeded_generator(config.seed, epoch, number)
                pixels = augment(pixels, flip=config.flip, shift=config.shift, generator=generator)
            yield to_float(pixels, config.pixel_range), self._labels[chosen]


def to_float(pixels: Tensor, pixel_range: PixelRange = "unit") -> Tensor:
    """Converts [rows, size, size, 3] uint8 to [rows, 3, size, size] float32, 0 to 1 or -1 to 1."""
    unit = pixels.permute(0, 3, 1, 2).float().div_(255)
    return unit if pixel_range == "unit" else unit.mul_(2).sub_(1)


def augment(pixels: Tensor, *, flip: bool, shift: float, generator: torch.Generator) -> Tensor:
    """Mirrors half of the images, [rows, size, size, 3] uint8, and shifts each at random; the edge pixels are repeated.

    ``shift`` is the maximum shift in each direction, as a fraction of the side.
    """
    rows, size = len(pixels), pixels.shape[1]
    most = round(shift * size)
    if not (flip or most):
        return pixels
    offsets = torch.randint(-most, most + 1, (2, rows, 1), generator=generator)
    down, across = (torch.arange(size) + offset for offset in offsets)
    down, across = down.clamp(0, size - 1), across.clamp(0, size - 1)
    if flip:
        mirrored = torch.rand(rows, 1, generator=generator) < 0.5
        across = torch.where(mirrored, size - 1 - across, across)
    return pixels[torch.arange(rows)[:, None, None], down[:, :, None], across[:, None, :]]
