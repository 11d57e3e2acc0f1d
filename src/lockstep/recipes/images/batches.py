"""Global batches of pictures: shuffled and augmented anew in every epoch, or fixed.

    pixels [pictures, size, size, 3] uint8 -> chosen rows -> flipped, shifted -> [rows, 3, size, size] float32

Everything drawn depends on (seed, epoch, batch) alone, so an epoch can be repeated, on any number of replicas and with
any number of decoding processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.recipes.shuffling import seeded_generator, shuffled_order

PixelRange = Literal["unit", "centred"]


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How pictures become batches.

    Args:
        batch_size: pictures in a global batch; the last may be smaller.
        pixel_range: "unit" is 0 to 1, "centred" -1 to 1.
        shuffle: another order in every epoch; else the order given.
        shuffle_buffer: pictures that are shuffled together; 0 is all of them.
        flip: mirror half of the pictures.
        shift: pictures are moved by up to this part of their side.
        seed: where all that is drawn begins.
    """

    batch_size: int
    pixel_range: PixelRange = "unit"
    shuffle: bool = False
    shuffle_buffer: int = 0
    flip: bool = False
    shift: float = 0.0
    seed: int = 0


class PictureBatches:
    """The global batches of an epoch, as items (x, y) of a ``Model``'s data.

    x holds pictures [rows, 3, size, size] float32 (in memory with the channels last, as convolutions on a CPU want
    them), y labels [rows] int64; on the CPU.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8; may be a file mapped into memory.
        rows: places in ``pixels`` of the pictures to take, in order.
        labels: one for each of ``rows``.
        settings: how they are batched.
    """

    def __init__(self, pixels: Any, rows: Sequence[int], labels: Sequence[int], *, settings: BatchSettings) -> None:
        self._pixels = pixels
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self._labels = torch.tensor(labels, dtype=torch.int64)
        self._settings = settings
        self._epoch = 0

    @property
    def pictures(self) -> int:
        """Pictures in an epoch."""
        return len(self._rows)

    def made_up(self, pictures: int) -> tuple[Tensor, Tensor]:
        """A batch of so many pictures of nothing, of the real size: what a step takes does not depend on them."""
        pixels = torch.zeros(pictures, *self._pixels.shape[1:], dtype=torch.uint8)
        return to_float(pixels, self._settings.pixel_range), torch.zeros(pictures, dtype=torch.int64)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration draw the order and the augmentation of that epoch, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._settings.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seed, epoch = self._settings.seed, self._epoch
        for number, chosen in enumerate(torch.split(self._order(seed, epoch), self._settings.batch_size)):
            pixels = torch.from_numpy(self._pixels[self._rows[chosen].numpy()])
            moved = augment(
                pixels,
                flip=self._settings.flip,
                shift=self._settings.shift,
                generator=seeded_generator(seed, epoch, number),
            )
            yield to_float(moved, self._settings.pixel_range), self._labels[chosen]

    def _order(self, seed: int, epoch: int) -> Tensor:
        if not self._settings.shuffle:
            return torch.arange(len(self._rows))
        generator = seeded_generator(seed, epoch)
        return shuffled_order(len(self._rows), buffer=self._settings.shuffle_buffer, generator=generator)


def to_float(pixels: Tensor, pixel_range: PixelRange = "unit") -> Tensor:
    """[rows, size, size, 3] uint8 as [rows, 3, size, size] float32, 0 to 1 or -1 to 1."""
    unit = pixels.permute(0, 3, 1, 2).float().div_(255)
    return unit if pixel_range == "unit" else unit.mul_(2).sub_(1)


def augment(pixels: Tensor, *, flip: bool, shift: float, generator: torch.Generator) -> Tensor:
    """Mirrors half of the pictures and moves each at random; what moves in at an edge is that edge again.

    Args:
        pixels: [rows, size, size, 3] uint8; left as it is.
        flip: whether to mirror, left and right.
        shift: largest way, up and down and to the sides, as a part of the side.
        generator: the only source of randomness.
    """
    rows, size = len(pixels), pixels.shape[1]
    most = round(shift * size)
    if not (flip or most):
        return pixels
    ways = torch.randint(-most, most + 1, (2, rows, 1), generator=generator)
    down, across = (torch.arange(size) + way for way in ways)
    down, across = down.clamp(0, size - 1), across.clamp(0, size - 1)
    if flip:
        mirrored = torch.rand(rows, 1, generator=generator) < 0.5
        across = torch.where(mirrored, size - 1 - across, across)
    return pixels[torch.arange(rows)[:, None, None], down[:, :, None], across[:, None, :]]
