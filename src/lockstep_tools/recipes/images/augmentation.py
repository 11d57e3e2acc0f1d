"""Random changes of training images, so that a small set of them says more.

Each image is cropped at random and the crop is resized to the whole ("Going Deeper with Convolutions", Szegedy et al.
2015, section 6), then its contrast and brightness are changed. All random numbers come from one generator, for a whole
global batch, so they do not depend on the number of replicas.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_AREA = (0.5, 1.0)  # of the image; the usual least of 0.08 leaves hardly an object in a small picture
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))  # width over height
_CONTRAST, _BRIGHTNESS = (0.8, 1.2), (-0.1, 0.1)


def augment(images: Tensor, *, mirror: bool, generator: torch.Generator) -> Tensor:
    """Returns images [rows, 3, size, size] float32 from 0 to 1, changed at random, in the same memory format.

    ``mirror`` turns left and right around in half of them. It is wrong for digits and letters, whose mirror images are
    other ones or none.
    """
    rows = len(images)

    def uniform(least: float, most: float) -> Tensor:
        return torch.rand(rows, generator=generator) * (most - least) + least

    area, ratio = uniform(*_AREA), uniform(*_LOG_RATIO).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    offset_x, offset_y = uniform(-1, 1) * (1 - width), uniform(-1, 1) * (1 - height)
    contrast, brightness = uniform(*_CONTRAST), uniform(*_BRIGHTNESS)
    # A negative width turns left and right around in the same resampling.
    if mirror:
        width = torch.where(uniform(0, 1) < 0.5, -width, width)
    zero = torch.zeros(rows)
    # Maps places in the crop to places in the image; both go from -1 to 1.
    crop = torch.stack([torch.stack([width, zero, offset_x], 1), torch.stack([zero, height, offset_y], 1)], 1)
    # One resampling crops, mirrors and resizes a whole batch, in torch alone: torchvision is no dependency here.
    grid = F.affine_grid(crop, list(images.shape), align_corners=False)
    cropped = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    changed = (cropped - 0.5) * contrast[:, None, None, None] + (0.5 + brightness)[:, None, None, None]
    return changed.clamp_(0, 1).contiguous(memory_format=torch.channels_last)
