from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from PIL import Image

from lockstep.recipes.images.dataset import summarize_images

if TYPE_CHECKING:
    from tests.recipes.images.conftest import MakeConfig, MakeTree


@pytest.mark.parametrize("workers", [0, 2])
def test_counts_sizes_and_broken_pictures_of_a_tree(workers: int, make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"train/a": 20, "train/b": 10, "test/b": 4})
    Image.new("RGB", (100, 50)).save(root / "train" / "b" / "large.png")
    (root / "test" / "b" / "000.png").write_bytes(b"")
    said: list[tuple[int, int]] = []

    summary = summarize_images(tiny(data=root, workers=workers), progress=lambda done, of: said.append((done, of)))

    assert (summary.source, summary.classes, summary.num_images) == (str(root), ("a", "b"), 35)
    assert summary.counts == {"train": (18, 10), "valid": (2, 1), "test": (0, 4)}
    assert summary.sizes == {(10, 12): 33, (100, 50): 1}
    assert summary.broken == {root / "test" / "b" / "000.png": "empty file"}
    assert summary.rule.endswith("by the hash of an image's name within each class: valid (0.1)")
    assert said[-1] == (35, 35)


def test_the_digits_are_described_without_files(tiny: MakeConfig):
    summary = summarize_images(tiny(valid_fraction=0.0))

    assert (summary.num_images, summary.sizes) == (1797, {(8, 8): 1797})
    assert summary.rule == "the splits are those of the data"
