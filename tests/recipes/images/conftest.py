"""Tiny trees of pictures, each of its own colour, and a tiny run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lockstep_tools.recipes.images.config import ImagesConfig

MakeTree = Callable[..., Path]
MakeConfig = Callable[..., ImagesConfig]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """``make_tree("data", {"train/a": 3, "train/b": 2})``: folders of that many PNGs of 10x12, no two alike."""

    def make(name: str, folders: dict[str, int], *, suffix: str = ".png") -> Path:
        root = tmp_path / name
        for shade, (folder, pictures) in enumerate(folders.items()):
            (root / folder).mkdir(parents=True)
            for number in range(pictures):
                color = (40 * shade % 256, 7 * number % 256, 200 - 20 * (number % 10))
                Image.new("RGB", (10, 12), color).save(root / folder / f"{number:03}{suffix}")
        return root

    return make


@pytest.fixture
def tiny() -> MakeConfig:
    """A function that makes the config of a tiny run, with the settings given."""

    def make(**settings: Any) -> ImagesConfig:
        defaults: dict[str, Any] = {
            "size": 8,
            "output_stride": 8,
            "width_multiplier": 0.1,
            "batch_size": 11,
            "epochs": 1,
            "workers": 0,
        }
        return ImagesConfig(**{**defaults, **settings})

    return make
