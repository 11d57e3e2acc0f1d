"""Models cut into stages, one after another in this process: together they are the model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import ScheduleName, choose_pipeline_config
from lockstep.parallel.pipeline_stage import LayerCut, PipelineSplit, Stage, StandIn, tied_ends

WORDS = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(WORDS).index_fill(1, torch.tensor([5]), 0)


def build(name: str, layers: int = 5) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        config: Any = transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).eval()
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()
    if name == "granite":  # multiplies the embeddings
        config = transformers.GraniteConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, num_key_value_heads=2, embedding_multiplier=3.0, pad_token_id=0,
        )  # fmt: skip
        return transformers.GraniteForCausalLM(config).eval()
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=layers, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config).eval()


def stages_of(module: nn.Module, schedule: ScheduleName, split: PipelineSplit = "auto") -> list[Stage]:
    """Of all workers, in their order."""
    pipelining = choose_pipeline_config(schedule, None, 2)
    found = [
        stage
        for worker in range(2)
        for stage in LayerCut(deepcopy(module), split, pipelining).cut(pipelining.stages_of(worker))
    ]
    return sorted(found, key=lambda stage: stage.number)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "granite"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble_v"])
def test_one_after_another_they_are_the_model(name: str, schedule: ScheduleName):
    module = build(name)
    values: Any = ()
    for stage in stages_of(module, schedule):
        stage.activate()
        values = stage(*values, inputs={"input_ids": WORDS, "attention_mask": MASK})

    assert torch.allclose(
        values.logits, module(input_ids=WORDS, attention_mask=MASK, use_cache=False).logits, atol=1e-6
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_a_model_of_images_is_cut_too_and_keeps_its_dtype(schedule: ScheduleName):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=5, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    module: Any = transformers.ViTForImageClassification(config).eval().to(torch.bfloat16)
    images = torch.randn(3, 3, 8, 8, dtype=torch.bfloat16)
    values: Any = ()
    for stage in stages_of(module, schedule):
        stage.activate()
        values = stage(*values, inputs={"pixel_values": images})

    torch.testing.assert_close(values.logits, module(images).logits)


def test_a_layer_that_gives_more_than_hidden_states_is_refused_by_name():
    module: Any = build("llama")
    module.model.layers[0].register_forward_hook(lambda _, __, output: (output, None))  # as layers of GLM-5 give
    first = stages_of(module, "1f1b")[0]
    with pytest.raises(ConfigError, match=r"LlamaDecoderLayer gives the next layer a tuple.*choose pipeline=1"):
        first(inputs={"input_ids": WORDS})


def test_the_stages_of_a_worker_are_parts_of_one_module_with_its_plain_names():
    module = build("bert")
    first, last = LayerCut(module, [1, 1, 2, 1], choose_pipeline_config("zero_bubble_v", None, 2)).cut([0, 3])

    assert first.model is last.model is module
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert {name.split(".")[3] for name in names if ".layer." in name} == {"0", "4"}
    own, others = ({id(each) for each in stage.parameters()} for stage in (first, last))
    assert own | others == {id(each) for each in module.parameters()}
    tied = module.get_parameter("cls.predictions.decoder.weight")
    assert own & others == {id(tied)}  # the words, which the head shares


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"4 stages.* 3 layers"):
        stages_of(build("gpt2", 3), "interleaved")
    with pytest.raises(ConfigError, match=r"pipeline_split=\(2, 3\) does not divide 5 layers into 4 stages"):
        stages_of(build("gpt2"), "interleaved", [2, 3])


def test_a_weight_is_common_to_the_first_and_the_last_worker_or_to_one():
    ties = [["words", "head"], ["a", "b"]]

    assert tied_ends(ties, [{"words", "a", "b", "norm"}, {"c"}, {"head", "norm"}]) == [["words", "head"], ["norm"]]
    with pytest.raises(ConfigError, match=r"a and b .* workers \[0, 1\]"):
        tied_ends(ties, [{"words", "a"}, {"b"}, {"head"}])
    with pytest.raises(ConfigError, match=r"norm .* workers \[1, 2\]"):
        tied_ends(ties, [{"words"}, {"norm"}, {"norm", "head"}])


def test_what_stands_in_for_a_module_of_another_stage_says_so():
    with pytest.raises(AttributeError, match=r"another worker .* has the stage .*`if hasattr\(module, 'weight'\):`"):
        StandIn().weight.register_hook(lambda gradient: gradient)
    assert not hasattr(StandIn(), "weight")
    assert deepcopy(StandIn("embeds"))(torch.ones(2)).sum() == 2
