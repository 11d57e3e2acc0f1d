from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.recipes.images.config import ImagesConfig
from lockstep.scaling.recipes import RECIPES, build_work, find_recipe

SMALL = ImagesConfig(width_multiplier=0.1, size=32, workers=0)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_batch_size_and_says_what_it_trains(name: str):
    recipe = find_recipe(name)

    assert recipe.fixed < {field.name for field in fields(recipe.config)}
    assert "batch_size" in recipe.fixed
    assert recipe.title(recipe.config()).endswith("fp32")


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match="no recipe is called 'tulips'; choose from images, mlm"):
        find_recipe("tulips")


def test_the_pictures_come_in_the_batches_asked_for_and_have_a_loss_each(pictures: Path):
    work = build_work("images", replace(SMALL, data=pictures), 12)
    x, labels = next(iter(work.train))

    assert (x.shape, labels.shape) == ((12, 3, 32, 32), (12,))
    losses = work.loss(work.module(x), labels)
    assert losses.shape == (12,)
    assert isinstance(work.make_optimizer(work.module.parameters()), torch.optim.Adam)
