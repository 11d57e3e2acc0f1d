"""What a model's own plans make of it, and what is refused before any weight is moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from lockstep.errors import ConfigError
from lockstep.parallel.tensor_parallel import reorder
from lockstep.parallel.tensor_plan import DividedModel, plan_tensors
from lockstep.parallel.transformers_plans import require_layers, require_model_spec, sizes_of

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 36, "pad_token_id": 0,
}  # fmt: skip


def on_meta(cls: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = cls(config)
    return module


def llama(**sizes: Any) -> nn.Module:
    return on_meta(LlamaForCausalLM, LlamaConfig(**{**SIZES, **sizes}))


def refused(module: nn.Module, degree: int, *, sequences: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_tensors(module, "auto", degree, sequences=sequences)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_degree_does_not_divide_is_refused_with_its_name():
    assert "num_attention_heads=6" in refused(llama(), 4)
    assert "num_key_value_heads=3" in refused(llama(), 2)
    assert "layers.0.mlp" in refused(llama(intermediate_size=37), 3)
    plan_tensors(llama(), "auto", 3, sequences=True)


def test_layers_that_differ_in_heads_are_each_looked_at():
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, per_layer_config={1: {"num_key_value_heads": 2}})
    assert sizes_of(config, "num_key_value_heads") == [2, 3]
    assert sizes_of(config, "num_attention_heads") == [6]
    assert sizes_of(config, "num_wheels") == []


def test_experts_whose_units_the_degree_does_not_divide_are_refused():
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}
    plan_tensors(on_meta(MixtralForCausalLM, MixtralConfig(**sizes)), "auto", 3)
    sizes["intermediate_size"] = 37
    assert "layers.0.mlp.experts" in refused(on_meta(MixtralForCausalLM, MixtralConfig(**sizes)), 3)


def test_sequences_are_not_divided_between_experts():
    module = on_meta(MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1))
    message = refused(module, 3, sequences=True)
    assert "sequence_parallel=True" in message
    assert "mlp.experts" in message


def test_a_style_that_is_not_supported_is_refused_with_the_module():
    module: Any = llama()
    module._tp_plan = {**module._tp_plan, "model.layers.*.mlp.up_proj": "sideways"}
    message = refused(module, 3)
    assert '"sideways"' in message
    assert "model.layers.0.mlp.up_proj" in message
    assert "LlamaForCausalLM" in message


def test_an_unknown_style_is_refused_for_a_module_without_weights_too():
    module: Any = llama()
    module._tp_plan = {**module._tp_plan, "model.layers.*.mlp.act_fn": "sideways"}
    assert "model.layers.0.mlp.act_fn" in refused(module, 3)


def test_a_model_without_plans_is_refused():
    config = XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=32)
    for module in (nn.Linear(2, 2), on_meta(XLNetLMHeadModel, config)):
        message = refused(module, 2)
        assert type(module).__name__ in message
        assert "tensor_plan" in message
        with pytest.raises(ConfigError, match="pipeline_split"):
            require_layers(module, 'pipeline_split="auto"')


def test_a_plan_of_the_user_s_own_is_not_checked():
    plan_tensors(nn.Linear(2, 2), {}, 2)


def test_a_plan_of_the_user_s_own_is_refused_where_its_style_does_not_fit():
    module = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan_tensors(module, plan, 1)
    with pytest.raises(ConfigError, match=r"tensor=2 does not divide the in_features of '2'=7"):
        plan_tensors(module, plan, 2)
    plan_tensors(module, {"2": RowwiseParallel(input_layouts=Replicate())}, 2)
    with pytest.raises(ConfigError, match=r"'1' the style ColwiseParallel, and it is a ReLU"):
        plan_tensors(module, {"1": ColwiseParallel()}, 2)


@pytest.mark.parametrize(
    "wrap",
    [
        *(nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm),
        *(nn.utils.parametrizations.orthogonal, nn.utils.spectral_norm),
    ],
)
def test_a_layer_whose_weight_is_computed_is_refused(wrap: Any):
    module = nn.Sequential(wrap(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 4), wrap(nn.Linear(4, 4)))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    with pytest.raises(ConfigError, match=r"tensor_plan divides '0', whose weight is computed .*tensor=1"):
        plan_tensors(module, plan, 2)
    plan_tensors(module, plan, 1)
    plan_tensors(module[1:], {"2": RowwiseParallel()}, 2)  # it may stand beside divided ones


def test_a_model_whose_weights_are_computed_is_refused():
    module = llama()
    with torch.device("meta"):
        nn.utils.parametrizations.weight_norm(module.model.layers[0].mlp.up_proj)

    with pytest.raises(ConfigError, match=r"plan divides 'model\.layers\.0\.mlp\.up_proj', whose weight is computed"):
        plan_tensors(module, "auto", 3)


def test_the_parts_of_a_model_are_those_of_its_plans():
    spec = require_model_spec(llama(), "a test")

    assert spec.layers == "layers"
    assert dict(spec.first_stage) == {"embed_tokens": "embeds"}
    assert list(spec.last_stage) == ["norm"]
    assert spec.heads == ("lm_head",)
    assert spec.styles["embed_tokens"] == "embedding_rowwise"
    assert spec.styles["layers.*.self_attn.o_proj"] == "rowwise"


def test_a_model_without_plans_of_its_own_has_ours():
    module = on_meta(BertForMaskedLM, BertConfig(num_hidden_layers=1, num_attention_heads=4, hidden_size=64))
    plan_tensors(module, "auto", 4, sequences=True)
    assert "num_attention_heads=4" in refused(module, 8)


def test_a_pipeline_whose_plan_leaves_out_parts_is_refused():
    module: Any = llama()
    module._pp_plan = {name: plan for name, plan in module._pp_plan.items() if name != "model.norm"}
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not have norm; choose pipeline=1"):
        require_layers(module, 'pipeline_split="auto"')


def test_norms_of_own_heads_that_a_plan_leaves_out_get_the_sum_of_all_gradients():
    module: Any = on_meta(Qwen3ForCausalLM, Qwen3Config(**SIZES))
    module._tp_plan = {name: style for name, style in module._tp_plan.items() if "_norm" not in name}
    found = DividedModel(module, require_model_spec(module, "a test")).modules
    assert found["model.layers.0.self_attn.k_norm"] == "replicated_with_grad_allreduce"


def test_an_embedding_with_a_norm_inside_stays_whole():
    module: Any = llama()
    assert "model.embed_tokens" in DividedModel(module, require_model_spec(module, "a test")).modules
    module.model.embed_tokens.norm = nn.LayerNorm(SIZES["hidden_size"])  # as in Muse Glimmer
    assert "model.embed_tokens" not in DividedModel(module, require_model_spec(module, "a test")).modules


def test_packed_experts_are_reordered_so_that_each_rank_has_a_share_of_each_output():
    module = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    before = module.get_parameter(name).detach().clone()  # [experts, 2 x 36, hidden]

    orders = plan_tensors(module, "auto", 3).orders
    assert torch.equal(module.get_parameter(name), before)
    reorder(module, orders)

    order = orders[name].columns
    assert orders[name].dim == 1
    assert order[:24].tolist() == [*range(12), *range(36, 48)]  # the first rank's: 12 of the gate, 12 of the other
    assert torch.equal(module.get_parameter(name), before[:, order])
