"""The part of ``torchvision.datasets`` that a program of ``examples`` uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


class ImageFolder(Dataset[tuple[Tensor, int]]):
    def __init__(self, root: Path, transform: Callable[[Image.Image], Tensor]) -> None:
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = [
            (path, self.class_to_idx[name]) for name in self.classes for path in sorted((root / name).iterdir())
        ]
        self.targets = [label for _, label in self.samples]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label
