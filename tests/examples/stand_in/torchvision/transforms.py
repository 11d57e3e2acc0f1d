"""The part of ``torchvision.transforms`` that a program of ``examples`` uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


@dataclass
class Compose:
    transforms: Sequence[Callable[[Any], Any]]

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


@dataclass
class Resize:
    size: int

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.resize((self.size, self.size))


@dataclass
class CenterCrop:
    size: int

    def __call__(self, image: Image.Image) -> Image.Image:
        return self.crop(image, *((extent - self.size) // 2 for extent in image.size))

    def crop(self, image: Image.Image, left: int, top: int) -> Image.Image:
        return image.crop((left, top, left + self.size, top + self.size))


class RandomCrop(CenterCrop):
    def __call__(self, image: Image.Image) -> Image.Image:
        return self.crop(image, *(int(torch.randint(extent - self.size + 1, ())) for extent in image.size))


class ToTensor:
    def __call__(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


@dataclass
class Normalize:
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)
