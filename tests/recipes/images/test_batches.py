from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep_tools.recipes.images.batches import ImageBatches, to_float
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import LabelledPixels

CONFIG = ImagesConfig(batch_size=4, seed=3)


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (12, 6, 6, 3), dtype=np.uint8)


def made(pixels: np.ndarray, config: ImagesConfig = CONFIG, *, training: bool = True) -> ImageBatches:
    images = LabelledPixels(pixels=torch.from_numpy(pixels), labels=tuple(row % 3 for row in range(12)))
    return ImageBatches(images, config, training=training)


def test_batches_hold_each_picture_once_with_its_label(pixels: np.ndarray):
    batches = made(pixels)
    found = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]
    assert len(batches) == 3
    assert [len(y) for _, y in batches] == [4, 4, 4]
    by_content = {(pixels[row].transpose(2, 0, 1) / 255).astype(np.float32).tobytes(): row for row in range(12)}
    rows = [by_content[x.numpy().tobytes()] for x, _ in found]
    assert sorted(rows) == list(range(12))
    assert [int(y) for _, y in found] == [row % 3 for row in rows]


def test_types_and_shapes_are_those_of_a_model(pixels: np.ndarray):
    x, y = next(iter(made(pixels)))
    assert (x.shape, x.dtype, y.dtype) == ((4, 3, 6, 6), torch.float32, torch.int64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert 0 <= x.min() < 0.05
    assert 0.95 < x.max() <= 1


def test_an_epoch_is_the_same_again_and_another_one_differs(pixels: np.ndarray):
    batches, again = made(pixels), made(pixels)

    def epoch(source: ImageBatches, number: int) -> torch.Tensor:
        source.set_epoch(number)
        return torch.cat([x for x, _ in source])

    assert torch.equal(epoch(batches, 2), epoch(again, 2))
    assert torch.equal(epoch(batches, 2), epoch(batches, 2))
    assert not torch.equal(epoch(batches, 2), epoch(batches, 3))
    assert not torch.equal(epoch(batches, 2), epoch(made(pixels, replace(CONFIG, seed=4)), 2))


def test_fixed_batches_stay_in_order_in_every_epoch(pixels: np.ndarray):
    fixed = made(pixels, training=False)
    first = torch.cat([x for x, _ in fixed])
    fixed.set_epoch(1)
    assert torch.equal(torch.cat([x for x, _ in fixed]), first)
    assert torch.equal(first[0], to_float(torch.from_numpy(pixels[:1]))[0])


def test_a_shuffle_buffer_keeps_pictures_near_their_place(pixels: np.ndarray):
    labels = list(range(200))
    images = LabelledPixels(pixels=torch.from_numpy(pixels[:1].repeat(200, axis=0)), labels=tuple(labels))
    many = ImageBatches(images, replace(CONFIG, shuffle_buffer=10, batch_size=200), training=True)
    (_, order), *_ = many
    assert sorted(order.tolist()) == labels
    assert all(row < place + 10 for place, row in enumerate(order.tolist()))


def test_the_pixels_are_left_alone(pixels: np.ndarray):
    before = pixels.copy()
    list(made(pixels))
    assert np.array_equal(pixels, before)
