"""What is counted of transformers' models: parameters, operations, sizes; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lockstep.errors import ConfigError
from lockstep_tools.plan.assumptions import Software
from lockstep_tools.plan.cost import predict
from lockstep_tools.plan.counting import count_model
from lockstep_tools.plan.division import Division, why_indivisible
from lockstep_tools.plan.hardware import device_kind
from lockstep_tools.plan.model_shape import ModelShape
from lockstep_tools.plan.search import usual_network
from lockstep_tools.plan.shapes import KNOWN_SHAPES, shape_of

transformers = pytest.importorskip("transformers")

_COMMON = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {"model_type": "llama", **_COMMON, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Types that differ in structure: tied weights, key-value heads, windows, joined projections, experts, two stacks.
TINY: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "bert": {**_COMMON, "vocab_size": 100},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 100, "n_positions": 64},
    "gpt_neox": {**_COMMON, "vocab_size": 100},
    "gemma3_text": {**_COMMON, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100, "sliding_window": 16},
    "phi3": {**_COMMON, "num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0},
    "mixtral": {**LLAMA, **_EXPERTS},
    "qwen3_moe": {**LLAMA, **_QWEN_EXPERTS, "head_dim": 8},
    "t5": {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48, "vocab_size": 100},
}


def tiny(kind: str) -> dict[str, Any]:
    return {**TINY[kind], "model_type": kind}


@pytest.mark.parametrize("kind", TINY)
def test_parameters_are_those_of_the_model(kind: str):
    config = transformers.AutoConfig.for_model(**tiny(kind))
    language = transformers.MODEL_FOR_MASKED_LM_MAPPING if kind == "bert" else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    make = transformers.T5ForConditionalGeneration if kind == "t5" else language[type(config)]
    expected = sum(parameter.numel() for parameter in make(config).parameters())
    assert count_model(tiny(kind)).parameters == expected
    assert shape_of(tiny(kind), sequence=64).parameters == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"])
def test_operations_are_those_that_a_real_forward_pass_takes(kind: str):
    config = transformers.AutoConfig.for_model(**tiny(kind))
    config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(48)[None] % 100)
    counts = count_model(tiny(kind))
    whole, shape = counts.of(""), shape_of(tiny(kind), sequence=48)

    assert counts.forward
    assert 48 * whole.token_flops + 48**2 * whole.pair_flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    # A plan counts three times as many for a step; a window leaves some out.
    a100 = device_kind("a100-80gb")
    step = predict(shape, Division(), device=a100, network=usual_network(a100, 1), software=Software()).model_flops
    within = shape.layers * 48 * (48 - shape.attended) * shape.pair_flops
    assert step / 3 == pytest.approx(counter.get_total_flops() - within, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl", "bert-base"])
def test_well_known_models_have_the_sizes_that_their_configs_say(name: str):
    configs = {
        "llama-3-8b": "type=llama, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256,"
        " num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=8192",
        "gpt2-xl": "type=gpt2, n_layer=48, n_embd=1600, n_head=25",
        "bert-base": "type=bert",
    }
    counted, known = shape_of(configs[name]), KNOWN_SHAPES[name]

    for size in ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "sequence", "gated", "tied"):
        assert getattr(counted, size) == getattr(known, size)
    assert (counted.causal, counted.saved, counted.predicted) == (known.causal, known.saved, known.predicted)
    assert counted.layer_parameters == known.layer_parameters
    assert counted.layer_matrices == known.layer_matrices
    assert counted.pair_flops == known.pair_flops


def test_mixtral_has_its_published_parameters_and_a_token_meets_a_quarter_of_them():
    """Jiang et al. 2024 (arXiv 2401.04088): 47 billion parameters, of which 13 billion are active."""
    counted = shape_of("type=mixtral, max_position_embeddings=32768")
    assert counted.parameters == 46_702_792_704
    assert counted.active_parameters == pytest.approx(12.9e9, rel=0.005)
    assert (counted.experts, counted.active_experts, counted.feed_forward, counted.gated) == (8, 2, 14336, True)
    sizes = "layers=32,hidden=4096,heads=32,kv_heads=8,feed_forward=14336,experts=8,active_experts=2,gated=1,biases=0"
    given = shape_of(f"{sizes},vocabulary=32000,sequence=32768,tied=0,embedding_rows=0")
    assert (given.parameters, given.active_parameters) == (counted.parameters, counted.active_parameters)


def test_experts_cost_the_operations_of_those_that_are_active_and_the_memory_of_all():
    dense, experts = (
        ModelShape(
            layers=8, hidden=4096, heads=32, feed_forward=8192, gated=True, vocabulary=32000, sequence=4096, **extra
        )
        for extra in ({}, {"experts": 8, "active_experts": 1})
    )
    a100 = device_kind("a100-80gb")
    plain, mixed = (
        predict(shape, Division(), device=a100, network=usual_network(a100, 1), software=Software())
        for shape in (dense, experts)
    )

    assert mixed.memory.weights > 3 * plain.memory.weights
    assert plain.compute_s < mixed.compute_s < 1.3 * plain.compute_s


def test_parameters_and_operations_are_known_by_module():
    counts = count_model(tiny("mixtral"))
    experts, attention = counts.of("model.layers.*.mlp.experts"), counts.of("model.layers.*.self_attn")
    assert experts.modules == attention.modules == 2
    assert experts.parameters == 2 * 4 * 3 * 32 * 48
    assert experts.token_flops == 2 * 2 * 2 * 3 * 32 * 48  # two of the four experts
    assert (experts.pair_flops, attention.pair_flops) == (0, 2 * 4 * 32)
    assert counts.in_layers.parameters == counts.of("model.layers.*").parameters


def test_a_folder_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = shape_of(tmp_path)
    assert (shape.kv_heads, shape.gated, shape.tied, shape.feed_forward) == (2, True, False, 48)
    assert shape.name == tmp_path.name
    assert shape_of(str(tmp_path / "config.json")).parameters == shape.parameters


def test_windows_of_some_layers_are_read():
    shape = shape_of("type=gemma3_text, num_hidden_layers=6", sequence=8192)
    assert (shape.window, round(shape.windowed * shape.layers)) == (4096, 5)
    assert shape.attended == pytest.approx((5 * 4096 + 8192) / 6)


def test_of_a_model_of_text_and_images_the_layers_of_text_are_planned():
    shape = shape_of("type=paddleocr_vl")
    assert (shape.layers, shape.hidden, shape.kv_heads) == (18, 1024, 2)  # of its images: 27 layers


def test_sizes_that_differ_between_layers_are_read():
    shape = shape_of("type=gemma4_text, num_hidden_layers=6", sequence=1024)
    assert shape.parameters == count_model({"model_type": "gemma4_text", "num_hidden_layers": 6}).parameters


def test_types_without_plans_are_planned_on_copies_alone():
    shape = shape_of("type=gpt_bigcode")
    assert why_indivisible(shape, data=2, pipeline=1, tensor=1, batch=8) is None
    reason = why_indivisible(shape, data=1, pipeline=1, tensor=2, batch=8)
    assert reason is not None
    assert reason.startswith("tensor=2 needs a plan for gpt_bigcode")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("type=lama", r"model_type='lama', expected one of the \d+ types of transformers; did you mean llama"),
        ("type=llama, num_hidden_layers", r"' num_hidden_layers' is no setting of a config, expected NAME=VALUE"),
        ("type=llama, num_attention_heads=5", r"'llama' is not the config of a llama: .*; give values that fit"),
        ("type=llama, hidden_size=many", r"'llama' is not the config of a llama: .*; give values that fit"),
        (
            "type=vit",
            r"'vit' is a vit, which takes pixel_values without one embedding of tokens, expected a model of text",
        ),
        (
            "type=clip",
            r"'clip' is a clip, which takes input_ids without one embedding of tokens, expected a model of text",
        ),
        (
            "type=funnel",
            r"'funnel' is a funnel, which has many parameters outside one list of layers, expected a model",
        ),
        ("type=musicgen", r"'musicgen' is not the config of a musicgen: Multiple valid text configs"),
        ("type=mamba2", r"num_attention_heads=None, expected a number above 0; give the sizes instead"),
        ("type=t5", r"the config of 't5' says no longest sequence; give the tokens per sequence, as --sequence 2048"),
        ("type=clip_text_model, num_hidden_layers=0", r"has no list of layers|without one embedding"),
    ],
)
def test_what_is_no_config_of_a_language_model_is_refused_in_one_line(model: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of(model)
    assert "\n" not in str(caught.value)
