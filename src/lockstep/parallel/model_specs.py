"""Model specs: the names of modules in transformers' model families. Pure.

A spec says where the embeddings, the layers and the heads are, which linear layers form column-row pairs, and where
dropout is drawn on parts of a layer. Tensor plans and pipeline splits follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from lockstep.errors import ConfigError

Names = Sequence[str]


@runtime_checkable
class HasConfig(Protocol):
    """A model of transformers."""

    config: Any
    base_model_prefix: str


def base_name(module: nn.Module) -> str:
    """The name of a model's body; empty if that is the model itself, without a head."""
    prefix = module.base_model_prefix if isinstance(module, HasConfig) else ""
    return prefix if prefix in dict(module.named_children()) else ""


@dataclass(frozen=True, kw_only=True)
class SequenceParallelSpec:
    """The modules of a layer that work on divided sequences, by names relative to the layer."""

    norms: Names  # normalise each token
    dropouts: Names = ()  # drop units of each token
    regions: Names  # begin with divided linear layers, and take the hidden states as first argument
    regions_by_name: Names = ()  # the same, with the hidden states as ``hidden_states=``


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Names of modules: those of a layer relative to it, those of the body to the base model, heads to the model."""

    layers: str  # the list of layers, in the body
    embedding: str  # the vocabulary's embedding, in the body
    column_linears: Names  # linear layers of a layer whose outputs are divided
    row_linears: Names  # linear layers of a layer whose inputs are divided, each after one of ``column_linears``
    fused: Sequence[tuple[str, int]] = ()  # of ``column_linears``, those that make several outputs in one; how many
    scaled: Sequence[tuple[str, str]] = ()  # (module, attribute) of a layer that is divided by the degree
    own_rng: Names  # modules of a layer that draw dropout on this rank's part
    common_rng: Names = ()  # modules inside those that draw alike on all tensor ranks
    sequence: SequenceParallelSpec  # what tensor ranks compute alike in a layer, unless they divide the sequences
    heads: Names  # linear layers of the model whose outputs are logits over the vocabulary
    # Modules of the body that only the first stage of a pipeline has, and what replaces each elsewhere: "embeds"
    # returns the hidden states in place of the embeddings, "zero" adds nothing to them, "identity" passes them on.
    first_stage: Mapping[str, str]
    last_stage: Names  # modules of the body that only the last stage has
    divisible: Names  # the sizes that the degree must divide, by their names in the configuration


BERT = ModelSpec(
    layers="encoder.layer",
    embedding="embeddings.word_embeddings",
    column_linears=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    row_linears=("attention.output.dense", "output.dense"),
    own_rng=("attention.self",),
    sequence=SequenceParallelSpec(
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        dropouts=("attention.output.dropout", "output.dropout"),
        regions=("attention.self", "intermediate"),
    ),
    heads=("cls.predictions.decoder",),
    first_stage={"embeddings": "embeds"},
    last_stage=("pooler",),
    divisible=("num_attention_heads", "hidden_size", "intermediate_size"),
)
GPT2 = ModelSpec(
    layers="h",
    embedding="wte",
    column_linears=("attn.c_attn", "mlp.c_fc"),
    row_linears=("attn.c_proj", "mlp.c_proj"),
    fused=(("attn.c_attn", 3),),
    scaled=(("attn", "split_size"),),
    own_rng=("attn",),
    common_rng=("attn.resid_dropout",),
    sequence=SequenceParallelSpec(
        norms=("ln_1", "ln_2"), dropouts=("attn.resid_dropout", "mlp.dropout"), regions=("attn", "mlp")
    ),
    heads=("lm_head",),
    first_stage={"wte": "embeds", "wpe": "zero", "drop": "identity"},
    last_stage=("ln_f",),
    divisible=("num_attention_heads", "hidden_size"),
)
LLAMA = ModelSpec(
    layers="layers",
    embedding="embed_tokens",
    column_linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    row_linears=("self_attn.o_proj", "mlp.down_proj"),
    own_rng=("self_attn",),
    sequence=SequenceParallelSpec(
        norms=("input_layernorm", "post_attention_layernorm"), regions=("mlp",), regions_by_name=("self_attn",)
    ),
    heads=("lm_head",),
    first_stage={"embed_tokens": "embeds"},
    last_stage=("norm",),
    divisible=("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"),
)
MODEL_SPECS = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA}  # by the ``model_type`` of a configuration


def require_model_spec(module: object, asked: str) -> ModelSpec:
    """The spec of a module, which ``asked``, such as 'tensor_plan="auto"', needs."""
    kind = str(getattr(module.config, "model_type", "")) if isinstance(module, HasConfig) else ""
    if kind not in MODEL_SPECS:
        raise ConfigError(
            f"{asked} knows transformers' models of the types {', '.join(MODEL_SPECS)}, got a {type(module).__name__}; "
            "give a plan of your own, as torch.distributed.tensor.parallel.parallelize_module takes it"
        )
    return MODEL_SPECS[kind]
