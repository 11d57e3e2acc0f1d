from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.recipes.images.config import ImagesConfig


def test_the_published_run_can_be_set():
    config = ImagesConfig(data=Path("PetImages"), size=224, batch_size=256, epochs=5, shuffle_buffer=1024, patience=0)
    assert (config.data, config.learning_rate, config.hidden) == (Path("PetImages"), 1e-3, 0)
    assert (config.size, config.width_multiplier, config.output_stride) == (224, 1.0, 32)


def test_every_field_is_documented():
    documentation = inspect.getdoc(ImagesConfig) or ""
    assert [f.name for f in dataclasses.fields(ImagesConfig) if f"\n    {f.name}: " not in documentation] == []


def test_there_is_a_decoder_for_each_core_unless_told():
    assert ImagesConfig().num_workers >= 1
    assert ImagesConfig(workers=0).num_workers == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 was given, expected at least 1"),
        ({"patience": -1}, "patience=-1 was given, expected at least 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1 was given, expected at least 0"),
        ({"workers": -1}, "workers=-1 was given, expected at least 0 and at most 256"),
        ({"size": 4, "output_stride": 32}, "size=4 was given, expected at least 32 and at most 4096"),
        ({"size": 31}, "size=31 was given, expected at least 32"),
        ({"size": 10**6}, "size=1000000 was given, expected"),
        ({"output_stride": 7}, "output_stride=7 was given; choose one of 8, 16 or 32"),
        ({"hidden": -1}, "hidden=-1 was given, expected at least 0"),
        ({"width_multiplier": 0.0}, "width_multiplier=0.0 was given, expected a number above 0"),
        ({"batch_norm_momentum": 0.0}, "batch_norm_momentum=0.0 was given, expected a number above 0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 was given, expected a number above 0"),
        ({"test_fraction": 0.0}, "test_fraction=0.0 was given, expected a number above 0 and at most 0.9"),
        ({"valid_fraction": 1.5}, "valid_fraction=1.5 was given, expected at least 0 and at most 0.9"),
    ],
)
def test_a_bad_setting_is_refused_when_the_config_is_made(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        ImagesConfig(**settings)  # type: ignore[arg-type]
