"""Model specs: the names of modules in transformers' model families. Pure.

A spec says where the embeddings, the layers and the heads are, which linear layers form column-row pairs, and where
dropout is drawn on parts of a layer. Tensor plans and pipeline splits follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import ConfigError

Names = Sequence[str]


@runtime_checkable
class HasConfig(Protocol):
    """A model of transformers."""

    config: Any
    base_model_prefix: str


@dataclass(frozen=True, kw_only=True)
class SequenceParallelSpec:
    """The modules of a layer that work on divided sequences, by names relative to the layer.

    Args:
        norms: normalise each token.
        dropouts: drop units of each token.
        regions: begin with divided linear layers, and take the hidden states as first argument.
        regions_by_name: the same, with the hidden states as ``hidden_states=``.
    """

    norms: Names
    dropouts: Names = ()
    regions: Names
    regions_by_name: Names = ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Names of modules: those of a layer relative to it, those of the body to the base model, heads to the model.

    Args:
        layers: the list of layers, in the body.
        embedding: the vocabulary's embedding, in the body.
        column_linears: linear layers of a layer whose outputs are divided.
        row_linears: linear layers of a layer whose inputs are divided, each after one of ``column_linears``.
        fused: of ``column_linears``, those that make several outputs in one, and how many.
        scaled: attributes of a layer's modules that are divided by the degree: (module, attribute).
        own_rng: modules of a layer that draw dropout on this rank's part.
        common_rng: modules inside those that draw alike on all tensor ranks.
        sequence: what tensor ranks compute alike in a layer, unless they divide the sequences.
        heads: linear layers of the model whose outputs are logits over the vocabulary.
        first_stage: modules of the body that only the first stage of a pipeline has, and what replaces each elsewhere:
            "embeds" returns the hidden states in place of the embeddings, "zero" adds nothing to them, "identity"
            passes them on.
        last_stage: modules of the body that only the last stage has.
        divisible: the sizes that the degree of tensor parallelism must divide, by their names in the configuration.
    """

    layers: str
    embedding: str
    column_linears: Names
    row_linears: Names
    fused: Sequence[tuple[str, int]] = ()
    scaled: Sequence[tuple[str, str]] = ()
    own_rng: Names
    common_rng: Names = ()
    sequence: SequenceParallelSpec
    heads: Names
    first_stage: Mapping[str, str]
    last_stage: Names
    divisible: Names


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
MODEL_SPECS = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA}
"""By the ``model_type`` of a configuration."""


def require_model_spec(module: object, asked: str) -> ModelSpec:
    """The spec of a module, which ``asked``, such as 'tensor_plan="auto"', needs.

    Raises:
        ConfigError: it has none; the message names the known ones.
    """
    kind = str(getattr(module.config, "model_type", "")) if isinstance(module, HasConfig) else ""
    if kind not in MODEL_SPECS:
        raise ConfigError(
            f"{asked} knows transformers' models of the types {', '.join(MODEL_SPECS)}, got a {type(module).__name__}; "
            "give a plan of your own, as torch.distributed.tensor.parallel.parallelize_module takes it"
        )
    return MODEL_SPECS[kind]
