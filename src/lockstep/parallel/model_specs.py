"""What the families of transformers' models call their parts: pure, on module names.

A family says where the embeddings, the layers and the heads are, which pairs of linear layers share a layer's work, and
where dropout is drawn on parts of a layer. Tensor plans and pipeline splits follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import ConfigError


@runtime_checkable
class HasConfig(Protocol):
    """A model of transformers: what its configuration calls its sizes."""

    config: Any
    base_model_prefix: str


@dataclass(frozen=True, kw_only=True)
class SequenceParallelSpec:
    """What of a layer is between those parts that tensor ranks divide; all names are relative to the layer.

    Args:
        norms: what normalises each token.
        dropouts: what drops units of each token.
        regions: modules that begin with divided linear layers, called with the hidden states as first argument.
        regions_by_name: the same, called with ``hidden_states=``.
    """

    norms: Sequence[str]
    dropouts: Sequence[str] = ()
    regions: Sequence[str]
    regions_by_name: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Names of modules; those of a layer are relative to it, those of the body to the base model, heads to the model.

    Args:
        layers: the list of layers.
        words: the embedding of words.
        columns: linear layers of a layer whose outputs are divided.
        rows: linear layers of a layer whose inputs are divided, each after one of ``columns``.
        fused: linear layers among ``columns`` that make several outputs in one, and how many.
        scaled: attributes of a layer's modules that are divided: (module, attribute).
        apart: modules of a layer that draw dropout on their own part.
        together: modules inside those that draw alike on all workers of the layer.
        between: what of a layer tensor ranks compute alike, unless they divide the sequences.
        heads: linear layers of the whole model that score the words.
        begins: modules of the body that only the first stage of a pipeline has, and what stands for them on others:
            "handed" gives the hidden states in place of the embeddings, "nothing" adds nothing to them, "through" lets
            them through.
        ends: modules of the body that only the last stage has.
        sizes: what the degree of tensor parallelism must divide, as the configuration calls it.
    """

    layers: str
    words: str
    columns: Sequence[str]
    rows: Sequence[str]
    fused: Sequence[tuple[str, int]] = ()
    scaled: Sequence[tuple[str, str]] = ()
    apart: Sequence[str]
    together: Sequence[str] = ()
    between: SequenceParallelSpec
    heads: Sequence[str]
    begins: Mapping[str, str]
    ends: Sequence[str]
    sizes: Sequence[str]


BERT = ModelSpec(
    layers="encoder.layer",
    words="embeddings.word_embeddings",
    columns=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    rows=("attention.output.dense", "output.dense"),
    apart=("attention.self",),
    between=SequenceParallelSpec(
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        dropouts=("attention.output.dropout", "output.dropout"),
        regions=("attention.self", "intermediate"),
    ),
    heads=("cls.predictions.decoder",),
    begins={"embeddings": "handed"},
    ends=("pooler",),
    sizes=("num_attention_heads", "hidden_size", "intermediate_size"),
)
GPT2 = ModelSpec(
    layers="h",
    words="wte",
    columns=("attn.c_attn", "mlp.c_fc"),
    rows=("attn.c_proj", "mlp.c_proj"),
    fused=(("attn.c_attn", 3),),
    scaled=(("attn", "split_size"),),
    apart=("attn",),
    together=("attn.resid_dropout",),
    between=SequenceParallelSpec(
        norms=("ln_1", "ln_2"), dropouts=("attn.resid_dropout", "mlp.dropout"), regions=("attn", "mlp")
    ),
    heads=("lm_head",),
    begins={"wte": "handed", "wpe": "nothing", "drop": "through"},
    ends=("ln_f",),
    sizes=("num_attention_heads", "hidden_size"),
)
LLAMA = ModelSpec(
    layers="layers",
    words="embed_tokens",
    columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    rows=("self_attn.o_proj", "mlp.down_proj"),
    apart=("self_attn",),
    between=SequenceParallelSpec(
        norms=("input_layernorm", "post_attention_layernorm"), regions=("mlp",), regions_by_name=("self_attn",)
    ),
    heads=("lm_head",),
    begins={"embed_tokens": "handed"},
    ends=("norm",),
    sizes=("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"),
)
MODEL_SPECS = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA}
"""By what a configuration calls its ``model_type``."""


def model_spec_of(module: object) -> ModelSpec | None:
    """The family of a module; None for any other module."""
    if not isinstance(module, HasConfig):
        return None
    return MODEL_SPECS.get(str(getattr(module.config, "model_type", "")))


def require_model_spec(module: object, asked: str) -> ModelSpec:
    """The family of a module.

    Args:
        module: any.
        asked: what it is asked for, such as 'tensor_plan="auto"'.

    Raises:
        ConfigError: it has none; the message names those that there are.
    """
    family = model_spec_of(module)
    if family is None:
        raise ConfigError(
            f"{asked} knows transformers' models of the types {', '.join(MODEL_SPECS)}, got a {type(module).__name__}; "
            "give a plan of your own, as torch.distributed.tensor.parallel.parallelize_module takes it"
        )
    return family
