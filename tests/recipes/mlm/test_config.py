from __future__ import annotations

import dataclasses
import inspect

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.recipes.mlm.config import MlmConfig


def test_the_recipe_is_the_published_workload():
    config = MlmConfig()
    sizes = (config.layers, config.hidden, config.heads, config.feed_forward, config.vocabulary, config.dropout)
    assert sizes == (2, 128, 2, 512, 30522, 0.1)
    assert (config.batch_size, config.epochs, config.patience, config.sequence_length) == (128, 5, 2, 512)
    assert (config.mask_fraction, config.max_masked) == (0.15, 96)


def test_the_learning_rate_is_the_published_one_for_pretrained_weights_only():
    assert MlmConfig(pretrained="bert").first_rate == 1e-4
    assert MlmConfig().first_rate > 1e-4
    assert MlmConfig(pretrained="bert", learning_rate=0.5).first_rate == 0.5


def test_the_published_order_shuffles_500_lines_together_and_sorts_none():
    assert [(config.buffer, config.window) for config in (MlmConfig(), MlmConfig(order="published"))] == [
        (0, 64),
        (500, 1),
    ]
    assert MlmConfig(order="published", shuffle_buffer=0, length_window=1).buffer == 0


def test_every_field_is_documented():
    documentation = inspect.getdoc(MlmConfig) or ""
    assert [f.name for f in dataclasses.fields(MlmConfig) if f"\n    {f.name}: " not in documentation] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 was given, expected at least 1"),
        ({"layers": 0}, "layers=0 was given, expected at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 was given, expected at least 0 and at most 0.9"),
        ({"length_window": 0}, "length_window=0 was given, expected at least 1"),
        ({"order": "cached"}, "order='cached' is unknown; choose one of grouped, published"),
        (
            {"order": "published", "length_window": 8},
            "length_window=8 was given, which sorts lines by length, and order='published', which does not; leave one",
        ),
        ({"sequence_length": 2}, "sequence_length=2 was given, expected at least 3"),
        ({"patience": -1}, "patience=-1 was given, expected at least 0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 was given, expected a number above 0"),
        ({"padding": "left"}, "padding='left' is unknown; choose one of longest, full"),
        ({"heads": 3}, "heads=3 does not divide hidden=128"),
        ({"mask_fraction": 2.0}, "mask_fraction=2.0 was given"),
        ({"mask_fraction": 0.0}, "mask_fraction=0.0 was given, expected a number above 0 and at most 1"),
        ({"max_masked": 0}, "max_masked=0 was given"),
        ({"vocabulary": 3}, "vocabulary=3 was given"),
        ({"vocabulary": 10**11}, "vocabulary=100000000000 was given, expected more than"),
    ],
)
def test_a_bad_setting_is_refused_when_the_config_is_made(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        MlmConfig(**settings)  # type: ignore[arg-type]
