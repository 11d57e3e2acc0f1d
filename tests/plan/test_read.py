"""Shapes from what people have in hand; those of transformers' models are counted beside real modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.plan import KNOWN_SHAPES, ModelShape, shape_of
from lockstep.recipes.mlm.config import MlmConfig

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def test_a_shape_is_a_shape():
    assert shape_of(KNOWN_SHAPES["gpt2"]) is KNOWN_SHAPES["gpt2"]
    assert shape_of("gpt2", sequence=128).sequence == 128


def test_the_recipe_is_bert_tiny_that_is_asked_about_its_masked_tokens():
    shape = shape_of(MlmConfig())

    assert (shape.layers, shape.hidden, shape.vocabulary, shape.sequence) == (2, 128, 30522, 512)
    assert shape.parameters == KNOWN_SHAPES["bert-tiny"].parameters
    assert shape.predicted == 96 / 512


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


def test_a_gpt2_config_by_its_own_names():
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None, "n_positions": 1024, "vocab_size": 50257}

    assert shape_of({"model_type": "gpt2", **sizes}).parameters == KNOWN_SHAPES["gpt2"].parameters


def test_a_folder_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = shape_of(tmp_path)

    assert (shape.kv_heads, shape.gated, shape.tied, shape.feed_forward) == (2, True, False, 48)
    assert shape.name == tmp_path.name
    assert shape_of(str(tmp_path / "config.json")).parameters == shape.parameters


def test_folders_that_hold_no_config_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no config\.json; expected a model saved by transformers"):
        shape_of(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as the config of a model"):
        shape_of(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        shape_of(tmp_path)


def test_configs_of_other_families_and_halves_of_configs_are_refused():
    with pytest.raises(ConfigError, match=r"model_type='t5' is not a family that can be planned; choose one of bert"):
        shape_of({"model_type": "t5"})
    with pytest.raises(ConfigError, match=r"the config of 'llama' lacks 'vocab_size', which a llama has"):
        shape_of({name: value for name, value in LLAMA.items() if name != "vocab_size"})


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_transformers_model_has_as_many_parameters_as_its_shape(family: str):
    transformers = pytest.importorskip("transformers")
    if family == "bert":
        config = transformers.BertConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=100
        )
        module = transformers.BertModel(config, add_pooling_layer=False)
    else:
        config = transformers.LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})
        module = transformers.LlamaForCausalLM(config)

    assert shape_of(config).parameters == sum(parameter.numel() for parameter in module.parameters())
