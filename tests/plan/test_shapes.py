"""Parameters of well-known models, as they were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checks import alternatives, divisors
from lockstep.errors import ConfigError
from lockstep_tools.plan.model_shape import ModelShape
from lockstep_tools.plan.shapes import KNOWN_SHAPES, shape_of
from lockstep_tools.recipes.mlm.config import MlmConfig

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    # Without the pooler, which nothing asks.
    "bert-tiny": 4_385_920 - 128 * 129,
    "bert-base": 109_482_240 - 768 * 769,
    "bert-large": 335_141_888 - 1024 * 1025,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_its_published_parameters(name: str):
    assert KNOWN_SHAPES[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("1.7b", 1.7),
        ("3.6b", 3.6),
        ("7.5b", 7.5),
        ("18b", 18.4),
        ("39b", 39.1),
        ("76b", 76.1),
        ("145b", 145.6),
        ("310b", 310.1),
        ("530b", 529.6),
        ("1t", 1008.0),
    ],
)
def test_megatrons_models_have_the_parameters_of_their_table(name: str, billions: float):
    assert round(KNOWN_SHAPES[f"megatron-{name}"].parameters / 1e9, 1) == billions


def test_heads_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"heads=5 does not divide hidden=12; choose 1, 2, 3, 4, 6 or 12"):
        ModelShape(layers=2, hidden=12, heads=5, vocabulary=100, sequence=8)
    with pytest.raises(ConfigError, match=r"kv_heads=4 does not divide heads=6; choose 1, 2, 3 or 6"):
        ModelShape(layers=2, hidden=12, heads=6, kv_heads=4, vocabulary=100, sequence=8)
    with pytest.raises(ConfigError, match=r"layers=0 was given, expected at least 1"):
        ModelShape(layers=0, hidden=12, heads=6, vocabulary=100, sequence=8)


def test_learned_positions_grow_with_the_sequence_and_rotary_ones_do_not():
    gpt2, llama = KNOWN_SHAPES["gpt2"], KNOWN_SHAPES["llama-3-8b"]
    assert gpt2.with_sequence(2048).parameters - gpt2.parameters == 1024 * gpt2.hidden
    assert llama.with_sequence(1024).parameters == llama.parameters


def test_long_lists_of_divisors_are_shortened():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert alternatives(divisors(7)) == "1 or 7"
    assert alternatives([3]) == "3"
    assert alternatives(divisors(5040)).endswith(" ... or 5040")


def test_a_shape_is_a_shape():
    assert shape_of(KNOWN_SHAPES["gpt2"]) is KNOWN_SHAPES["gpt2"]
    assert shape_of("gpt2", sequence=128).sequence == 128


def test_the_recipe_is_bert_tiny_that_is_asked_about_its_masked_tokens():
    shape, config = shape_of("mlm"), MlmConfig()
    for name in ("layers", "hidden", "heads", "feed_forward", "vocabulary"):
        assert getattr(shape, name) == getattr(config, name)
    assert (shape.sequence, shape.predicted) == (config.sequence_length, config.max_masked / config.sequence_length)
    assert shape.parameters == KNOWN_SHAPES["bert-tiny"].parameters


def test_names_are_forgiving():
    assert shape_of("openai-community/GPT2-XL") is KNOWN_SHAPES["gpt2-xl"]
    assert shape_of("bert-base-uncased") is KNOWN_SHAPES["bert-base"]
    assert shape_of("meta-llama/Llama-2-7b-hf") is KNOWN_SHAPES["llama-2-7b"]
    with pytest.raises(ConfigError, match=r"the model 'gpt5' is no folder with a config.json and not in the table;"):
        shape_of("gpt5")


def test_sizes_are_a_model():
    shape = shape_of("layers=2, hidden=32, heads=4, vocabulary=100, sequence=64, gated=1, biases=0")
    assert shape == ModelShape(
        name="2 x 32", layers=2, hidden=32, heads=4, vocabulary=100, sequence=64, gated=True, biases=False
    )
    with pytest.raises(ConfigError, match=r"'depth=2' is no size of a model, expected NAME=NUMBER; choose of layers"):
        shape_of("depth=2")
    with pytest.raises(ConfigError, match=r"lack heads, vocabulary, sequence; add heads=NUMBER"):
        shape_of("layers=2,hidden=32")


def test_folders_that_hold_no_config_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot be read as the config of a model: .*No such file"):
        shape_of(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as the config of a model"):
        shape_of(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        shape_of(tmp_path)
