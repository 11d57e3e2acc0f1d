"""Model specs: how the models of transformers are divided, as names of modules and styles. Pure.

Most models carry plans: a tensor plan, which has a style for each divided module, and a pipeline plan, which lists the
modules of the body in their order. They come from the model's configuration and its class. The specs kept here are for
the types without plans, and are written in the same styles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
class ModelSpec:
    """How one type of models is divided. Names of modules have "*" in place of the numbers of layers."""

    styles: Mapping[str, str]  # of modules and parameters of the body, by transformers' names of styles
    head_styles: Mapping[str, str]  # the same of modules outside the body
    layers: str  # the list of layers, in the body; empty if it is not known
    # Modules of the body that only the first stage of a pipeline has, and what replaces each elsewhere: "embeds"
    # returns the hidden states in place of the embeddings, "zero" adds nothing to them, "identity" passes them on.
    first_stage: Mapping[str, str]
    last_stage: Names  # modules of the body that only the last stage has
    # Modules with packed styles, and how many outputs each makes in one, unless it is two.
    packed: Mapping[str, int] | None = None
    scaled: Mapping[str, str] | None = None  # modules of the body, and an attribute of each that the degree divides

    @property
    def heads(self) -> tuple[str, ...]:
        """The linear layers whose outputs may be logits over a vocabulary."""
        return tuple(name for name, style in self.head_styles.items() if style in GATHERED_STYLES)


GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")
"""The output features are divided, and the output is whole."""

_BERT_LAYER = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "attention.output.dense": "rowwise",
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
}
BERT = ModelSpec(
    styles={
        "embeddings.word_embeddings": "embedding_rowwise",
        **{f"encoder.layer.*.{name}": style for name, style in _BERT_LAYER.items()},
    },
    head_styles={"cls.predictions.decoder": "colwise_gather_output"},
    layers="encoder.layer",
    first_stage={"embeddings": "embeds"},
    last_stage=("pooler",),
)
ROBERTA = replace(BERT, head_styles={"lm_head.decoder": "colwise_gather_output"})
DISTILBERT = ModelSpec(
    styles={
        "embeddings.word_embeddings": "embedding_rowwise",
        "transformer.layer.*.attention.q_lin": "colwise",
        "transformer.layer.*.attention.k_lin": "colwise",
        "transformer.layer.*.attention.v_lin": "colwise",
        "transformer.layer.*.attention.out_lin": "rowwise",
        "transformer.layer.*.ffn.lin1": "colwise",
        "transformer.layer.*.ffn.lin2": "rowwise",
    },
    head_styles={"vocab_projector": "colwise_gather_output"},
    layers="transformer.layer",
    first_stage={"embeddings": "embeds"},
    last_stage=(),
)
GPT2 = ModelSpec(
    styles={
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    head_styles={"lm_head": "colwise_gather_output"},
    layers="h",
    first_stage={"wte": "embeds", "wpe": "zero", "drop": "identity"},
    last_stage=("ln_f",),
    packed={"h.*.attn.c_attn": 3},
    scaled={"h.*.attn": "split_size"},
)
VIT = ModelSpec(
    styles={
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
    head_styles={},
    layers="layers",
    first_stage={"embeddings": "embeds"},
    last_stage=("layernorm", "pooler"),
)
MODEL_SPECS = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTILBERT, "gpt2": GPT2, "vit": VIT}
"""By the ``model_type`` of a configuration: those for which transformers has no plans."""
_DECODER = ("embed_tokens", "layers", "norm")
BODIES: Mapping[str, Names] = {
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _DECODER),
    **dict.fromkeys(("hunyuan_v1_moe", "nemotron", "olmoe", "phimoe"), _DECODER),
    "jamba": ("embed_tokens", "layers", "final_layernorm"),
    "lfm2_moe": ("embed_tokens", "layers", "embedding_norm"),
}
"""By type, for those that have a tensor plan alone: the modules of the body, as a pipeline plan would have them.

It is not enough that a model has these modules: in nanochat layers also use what comes before the first one.
"""


def require_model_spec(module: object, setting: str) -> ModelSpec:
    """The spec of a module, which ``setting``, such as 'tensor_plan="auto"', needs."""
    if isinstance(module, nn.Module) and isinstance(module, HasConfig):
        kind = str(getattr(module.config, "model_type", ""))
        if kind in MODEL_SPECS:
            return MODEL_SPECS[kind]
        tensor, pipeline = (dict(getattr(module, name, None) or {}) for name in ("_tp_plan", "_pp_plan"))
        if tensor or pipeline:
            return _spec_of_plans(module, tensor, pipeline)
    raise ConfigError(
        f"{setting} needs a model of transformers that has plans of its own (a base_model_tp_plan and "
        f"base_model_pp_plan in its configuration), or one of the types {', '.join(MODEL_SPECS)}; for "
        f"{type(module).__name__} give a tensor_plan in torch's styles, or the names of modules as pipeline_split"
    )


def require_layers(module: nn.Module, setting: str) -> ModelSpec:
    """The spec of a module, whose list of layers ``setting`` needs."""
    spec = require_model_spec(module, setting)
    advice = "choose pipeline=1" if setting.startswith("pipeline") else "leave it out"
    body = dict(module.get_submodule(base_name(module)).named_modules())
    if spec.layers not in body or not spec.layers:
        raise ConfigError(
            f"{setting} needs to know the layers of the model, and {type(module).__name__} has no pipeline plan that "
            f"names them; {advice}"
        )
    plan_names = {*spec.first_stage, *spec.last_stage, spec.layers.partition(".")[0]}
    # A part that the plan leaves out would stay on every stage, and nothing tells on which of them it computes.
    for name, part in module.get_submodule(base_name(module)).named_children():
        if name not in plan_names and any(True for _ in part.parameters()):
            raise ConfigError(
                f"{setting} needs to know the parts of the model, and the pipeline plan of {type(module).__name__} "
                f"does not have {name}; {advice}"
            )
    return spec


def _spec_of_plans(module: nn.Module, tensor: Mapping[str, str], pipeline: Mapping[str, Any]) -> ModelSpec:
    """The spec that a model's own plans make, whose names are relative to the model."""
    base = f"{name}." if (name := base_name(module)) else ""
    body = [name.removeprefix(base) for name in pipeline if name.startswith(base)]
    modules = dict(module.get_submodule(base.removesuffix(".")).named_modules())
    # Some types have a tensor plan and no pipeline plan that names their list of layers.
    if not any(isinstance(modules.get(name), nn.ModuleList) for name in body):
        config: Any = module.config
        body = list(BODIES.get(config.model_type, ()))
    layers = next((name for name in body if isinstance(modules.get(name), nn.ModuleList)), "")
    place = body.index(layers) if layers else 0
    first, last = body[:place], body[place + 1 :]
    inside = {name.removeprefix(base): style for name, style in tensor.items() if name.startswith(base)}
    outside = {name: style for name, style in tensor.items() if not name.startswith(base)}
    # Where a plan leaves the table of input embeddings whole, its rows are divided all the same, as in Megatron-LM.
    embedding = _input_embedding(module.get_submodule(base.removesuffix(".")))
    if tensor and embedding and embedding not in inside:
        inside[embedding] = "embedding_rowwise"
    return ModelSpec(
        styles=inside,
        head_styles=outside,
        layers=layers,
        first_stage={name: "identity" if number else "embeds" for number, name in enumerate(first)},
        last_stage=last,
    )


def _input_embedding(body: nn.Module) -> str:
    """The name of the embedding of tokens; empty if there is none."""
    find: Any = getattr(body, "get_input_embeddings", None)
    try:
        embedding = find() if find is not None else None
    except (NotImplementedError, AttributeError):  # a body without tokens
        return ""
    names = [name for name, part in body.named_modules() if part is embedding and isinstance(part, nn.Embedding)]
    return names[0] if names else ""


def sizes_of(config: Any, name: str) -> list[int]:
    """The sizes of one name in a configuration of a model of text: one, or those of layers that differ, or none."""
    # transformers 5: layers of one model may have sizes of their own, and each must be divided evenly
    # (tests/parallel/test_tensor_plans.py: test_layers_that_differ_in_heads_are_each_looked_at).
    text = config.get_text_config()
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return sorted({size for layer in layers if isinstance(size := getattr(layer, name, None), int)})


def with_wildcards(name: str) -> str:
    """The name of a module or parameter as plans have it: "layers.0.mlp" is "layers.*.mlp"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
