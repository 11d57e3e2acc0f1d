from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.scaling.recipes import RECIPES

SMALL = ImagesConfig(width_multiplier=0.1, size=32, workers=0)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_batch_size_and_says_what_it_trains(name: str):
    recipe = RECIPES[name]
    assert recipe.fixed < {field.name for field in fields(recipe.config)}
    assert "batch_size" in recipe.fixed
    assert recipe.title(recipe.config()).endswith("fp32")


def test_the_pictures_come_in_the_batches_asked_for_and_have_a_loss_each(pictures: Path):
    task = RECIPES["images"].build(replace(SMALL, data=pictures, batch_size=12))
    x, labels = next(iter(task.train))
    assert (x.shape, labels.shape) == ((12, 3, 32, 32), (12,))
    losses = task.loss(task.module(x), labels)
    assert losses.shape == (12,)
    assert isinstance(task.optimizer(task.module.parameters()), torch.optim.Adam)
