from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.recipes.images.batches import ImageBatches, augment, to_float
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.shuffling import seeded_generator

CONFIG = ImagesConfig(batch_size=4, seed=3)


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (12, 6, 6, 3), dtype=np.uint8)


def made(pixels: np.ndarray, config: ImagesConfig = CONFIG, *, training: bool = True) -> ImageBatches:
    rows = [row for row in range(12) if row != 5]
    return ImageBatches(pixels, rows, [row % 3 for row in rows], config, training=training)


def test_batches_hold_each_picture_once_with_its_label(pixels: np.ndarray):
    batches = made(pixels)

    found = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]

    assert (len(batches), batches.num_rows) == (3, 11)
    assert [len(y) for _, y in batches] == [4, 4, 3]
    by_content = {(pixels[row].transpose(2, 0, 1) / 255).astype(np.float32).tobytes(): row for row in range(12)}
    rows = [by_content[x.numpy().tobytes()] for x, _ in found]
    assert sorted(rows) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert [int(y) for _, y in found] == [row % 3 for row in rows]


def test_types_and_shapes_are_those_of_a_model(pixels: np.ndarray):
    x, y = next(iter(made(pixels)))

    assert (x.shape, x.dtype, y.dtype) == ((4, 3, 6, 6), torch.float32, torch.int64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert 0 <= x.min() < 0.05
    assert 0.95 < x.max() <= 1


def test_pixels_can_be_centred(pixels: np.ndarray):
    unit = to_float(torch.from_numpy(pixels))

    assert torch.equal(to_float(torch.from_numpy(pixels), "centred"), unit * 2 - 1)


def test_an_epoch_is_the_same_again_and_another_one_differs(pixels: np.ndarray):
    config = replace(CONFIG, flip=True, shift=0.3)
    batches, again = made(pixels, config), made(pixels, config)

    def epoch(source: ImageBatches, number: int) -> torch.Tensor:
        source.set_epoch(number)
        return torch.cat([x for x, _ in source])

    assert torch.equal(epoch(batches, 2), epoch(again, 2))
    assert torch.equal(epoch(batches, 2), epoch(batches, 2))
    assert not torch.equal(epoch(batches, 2), epoch(batches, 3))
    assert not torch.equal(epoch(batches, 2), epoch(made(pixels, replace(config, seed=4)), 2))


def test_fixed_batches_stay_in_order_in_every_epoch(pixels: np.ndarray):
    fixed = made(pixels, training=False)
    first = torch.cat([x for x, _ in fixed])
    fixed.set_epoch(1)

    assert torch.equal(torch.cat([x for x, _ in fixed]), first)
    assert torch.equal(first[0], to_float(torch.from_numpy(pixels[:1]))[0])


def test_a_shuffle_buffer_keeps_pictures_near_their_place(pixels: np.ndarray):
    labels = list(range(200))
    many = ImageBatches(
        pixels[:1].repeat(200, axis=0),
        labels,
        labels,
        replace(CONFIG, shuffle_buffer=10, batch_size=200),
        training=True,
    )

    (_, order), *_ = many

    assert sorted(order.tolist()) == labels
    assert all(row < place + 10 for place, row in enumerate(order.tolist()))


def test_the_pixels_are_left_alone(pixels: np.ndarray):
    before = pixels.copy()

    list(made(pixels, replace(CONFIG, flip=True, shift=0.5)))

    assert np.array_equal(pixels, before)


def test_about_half_are_mirrored():
    picture = torch.arange(4, dtype=torch.uint8)[None, None, :, None].expand(400, 4, 4, 3)

    flipped = augment(picture, flip=True, shift=0.0, generator=seeded_generator(0))

    mirrored = (flipped[:, :, 0, 0] == 3).all(dim=1)
    assert torch.equal(flipped[mirrored], picture[mirrored].flip(2))
    assert torch.equal(flipped[~mirrored], picture[~mirrored])
    assert 150 < int(mirrored.sum()) < 250


def test_a_picture_is_moved_as_a_whole_by_at_most_the_share():
    size = 10
    place = torch.arange(size * size, dtype=torch.uint8).view(1, size, size, 1).expand(200, size, size, 3)

    moved = augment(place, flip=False, shift=0.2, generator=seeded_generator(0))[:, 5, 5, 0].long()

    ways = torch.stack([moved // size - 5, moved % size - 5])
    assert ways.unique().tolist() == [-2, -1, 0, 1, 2]
    assert len({tuple(way) for way in ways.T.tolist()}) == 25


def test_an_edge_that_moves_in_is_that_edge_again():
    picture = torch.arange(4, dtype=torch.uint8)[None, None, :, None].expand(50, 4, 4, 3)

    moved = augment(picture, flip=False, shift=0.25, generator=seeded_generator(0))

    rows = {tuple(row) for row in moved[:, 0, :, 0].tolist()}
    assert rows == {(0, 0, 1, 2), (0, 1, 2, 3), (1, 2, 3, 3)}
