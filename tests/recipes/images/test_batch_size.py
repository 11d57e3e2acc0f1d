"""The largest batch of the recipe: pictures of the run's size, within the memory there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from lockstep.recipes import training
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.train import build_images, find_largest_batch
from lockstep.replicas.cpu.memory import resident_mb

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]
    MakeConfig = Callable[..., ImagesConfig]


@pytest.fixture
def tree(make_tree: Callable[..., Path]) -> Path:
    return make_tree("data", {"train/a": 8, "train/b": 9, "test/a": 2, "test/b": 2, "valid/a": 1, "valid/b": 1})


def test_the_made_up_pictures_are_like_the_real_ones(tiny: MakeConfig, tree: Path):
    train = build_images(tiny(data=tree)).train
    pictures, labels = next(iter(train))
    dummy, classes = train.dummy_batch(len(pictures))

    assert (dummy.shape, dummy.dtype, dummy.stride()) == (
        pictures.shape,
        pictures.dtype,
        pictures.stride(),
    )
    assert (classes.shape, classes.dtype) == (labels.shape, labels.dtype)


@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_there_is_no_batch_larger_than_the_training_part(
    sync_batchnorm: bool, tiny: MakeConfig, tree: Path, make_strategy: MakeStrategy
):
    found = find_largest_batch(tiny(data=tree, sync_batchnorm=sync_batchnorm), make_strategy(2))

    assert (found.size, found.examples) == (16, 17)


def test_what_does_not_fit_is_not_found(
    tiny: MakeConfig,
    make_tree: Callable[..., Path],
    make_strategy: MakeStrategy,
    monkeypatch: pytest.MonkeyPatch,
):
    data = make_tree("data", {"train/a": 100, "train/b": 100, "test/a": 2, "test/b": 2, "valid/a": 1, "valid/b": 1})
    monkeypatch.setattr(training, "default_budget_mb", lambda _: resident_mb() + 60)
    found = find_largest_batch(tiny(data=data, size=96), make_strategy(2))

    assert 2 <= found.size < 100
