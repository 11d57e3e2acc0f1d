from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.recipes.reviews.config import ReviewsConfig


def test_the_recipe_leaves_nothing_to_fill_in():
    assert (ReviewsConfig().rate, ReviewsConfig().hidden_fraction) == (0.001, 0.4)
    pretrained = ReviewsConfig(pretrained="bert")
    assert (pretrained.rate, pretrained.hidden_fraction) == (2e-5, 0.0)
    assert ReviewsConfig(pretrained="bert", lora="r=8").rate == 5e-4
    assert ReviewsConfig(learning_rate=0.1, lora="r=8").rate == 0.1


def test_what_is_done_about_memory_is_one_object():
    memory = ReviewsConfig(lora="r=4,targets=query", pretrained="bert", gradient_checkpointing=True).memory
    assert memory.gradient_checkpointing
    assert memory.lora is not None
    assert (memory.lora.r, memory.lora.targets) == (4, ("query",))
    assert ReviewsConfig().memory.lora is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"limit": -1}, "limit=-1"),
        ({"max_tokens": 2}, "max_tokens=2"),
        ({"heads": 3}, "heads=3 does not divide hidden=128; choose 1, 2, 4"),
        ({"test_fraction": 0.0}, "test_fraction=0.0 was given, expected a number above 0"),
        ({"valid_fraction": 0.6}, "valid_fraction=0.6"),
        ({"hide": 1.0}, "hide=1.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"vocabulary": 5}, "vocabulary=5"),
        ({"lora": "rank=8"}, "lora='rank=8' was given, expected some of r, alpha"),
        ({"load_in": "8bit", "lora": "r=8"}, "load_in='8bit' needs pretrained weights"),
    ],
)
def test_a_bad_value_is_refused(settings: dict, said: str):
    with pytest.raises(ConfigError) as raised:
        replace(ReviewsConfig(), **settings)
    assert said in str(raised.value)
