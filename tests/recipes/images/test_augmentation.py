"""Random changes of training images: what they keep, and that they are drawn for whole global batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep_tools.recipes.images.augmentation import augment
from lockstep_tools.recipes.images.batches import ImageBatches
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import LabelledPixels

CONFIG = ImagesConfig(batch_size=5, seed=3, augment="crop")


@pytest.fixture(scope="module")
def pictures() -> LabelledPixels:
    """12 pictures of noise, in three classes."""
    pixels = torch.randint(256, (12, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return LabelledPixels(pixels=pixels, labels=tuple(row % 3 for row in range(12)))


def epoch_of(pictures: LabelledPixels, config: ImagesConfig, epoch: int, *, training: bool = True) -> torch.Tensor:
    batches = ImageBatches(pictures, config, training=training)
    batches.set_epoch(epoch)
    return torch.cat([images for images, _ in batches])


def test_an_epoch_is_the_same_again_and_the_next_one_is_changed_anew(pictures: LabelledPixels):
    first = epoch_of(pictures, CONFIG, 0)
    assert torch.equal(first, epoch_of(pictures, CONFIG, 0))
    plain = epoch_of(pictures, replace(CONFIG, augment="none"), 0)
    assert first.shape == plain.shape
    assert all((changed - image).abs().mean() > 0.01 for changed, image in zip(first, plain, strict=True))
    steady = replace(CONFIG, shuffle_buffer=1)  # the order of the files
    assert not torch.equal(epoch_of(pictures, steady, 0), epoch_of(pictures, steady, 1))


def test_order_and_labels_are_those_without_changes(pictures: LabelledPixels):
    labels = [torch.cat([y for _, y in ImageBatches(pictures, config, training=True)])
              for config in (CONFIG, replace(CONFIG, augment="none"))]  # fmt: skip
    assert torch.equal(*labels)


def test_validation_images_stay_as_they_are(pictures: LabelledPixels):
    plain = replace(CONFIG, augment="none")
    assert torch.equal(epoch_of(pictures, CONFIG, 0, training=False), epoch_of(pictures, plain, 0, training=False))


def test_images_stay_images(pictures: LabelledPixels):
    changed = augment(torch.rand(50, 3, 16, 16), mirror=True, generator=torch.Generator().manual_seed(0))
    assert changed.is_contiguous(memory_format=torch.channels_last)
    assert (changed.dtype, changed.min() >= 0, changed.max() <= 1) == (torch.float32, True, True)


@pytest.mark.parametrize("mirror", [False, True])
def test_only_mirroring_turns_left_and_right_around(mirror: bool):
    rising = torch.linspace(0, 1, 16).expand(200, 3, 16, 16)  # from left to right
    changed = augment(rising, mirror=mirror, generator=torch.Generator().manual_seed(0))
    falling = int((changed[..., 0] > changed[..., -1]).all(dim=2).all(dim=1).sum())
    assert 70 < falling < 130 if mirror else falling == 0
    rows = changed[:, :, :1].expand_as(changed)  # no row of a picture differs from another: top stays top
    assert torch.allclose(changed, rows, atol=1e-5)


def test_a_crop_is_at_least_half_of_the_image():
    ramp = torch.linspace(0, 1, 64).expand(200, 3, 64, 64)
    changed = augment(ramp, mirror=False, generator=torch.Generator().manual_seed(1))
    spans = (changed[:, 0, 0, -1] - changed[:, 0, 0, 0]).sort().values  # width times contrast
    assert 0.45 < spans[0] < 0.7
    assert spans[-1] > 0.9
