"""Counts what a model of transformers is made of: parameters, and operations of a forward pass, module by module.

The model is made on the meta device, which computes shapes alone: nothing is downloaded, and no memory is taken.
torch's ``FlopCounterMode`` counts the operations of sequences of two lengths, from which follow those per token and
those per pair of tokens (attention). ``counted_shape`` makes a model's sizes of these counts.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.parallel.transformers_plans import BODIES, MODEL_SPECS
from lockstep_tools.plan.model_shape import BERT_SAVED, GPT2_SAVED, LLAMA_SAVED, Counted, ModelShape, SavedActivations

# Parameters outside layers and embeddings, relative to those of the layers, above which a model is more than layers.
_LARGEST_OUTSIDE = 0.25
# Lengths of the two sequences that are counted. State space models work through chunks of 256 tokens.
_SHORT, _LONG = 256, 512


@dataclass(frozen=True, kw_only=True)
class ModuleCount:
    """The modules of one name, where ``*`` stands for a number in a list of layers."""

    name: str  # as in ``named_modules``, such as "model.layers.*.mlp"; empty for the model
    modules: int  # how many modules have this name
    parameters: int  # of all of them; a parameter that several modules hold counts in each
    token_flops: float  # of a forward pass, per token: what does not grow with the sequence
    pair_flops: float  # of a forward pass, per query and key: attention


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """What was counted in a model."""

    name: str
    config: Any  # the configuration of transformers
    stacks: tuple[str, ...]  # names of the lists of layers: one, or two in an encoder with a decoder
    layers: int  # in all stacks
    parameters: int  # of the whole model, each once
    experts: int  # of a layer; 0 without
    active_experts: int  # of a layer, which a token passes through
    expert_parameters: int  # of the experts of all layers
    tied: bool  # the output layer has the weight of the embedding, or there is none
    masked: bool  # tokens attend to later ones too: a masked language model, or an encoder
    position_rows: int  # rows of learned positions and segments, as wide as a hidden vector
    modules: tuple[ModuleCount, ...]
    forward: bool  # operations were counted in a forward pass; otherwise two for each weight of a matrix

    def of(self, *names: str) -> ModuleCount:
        """The sum of the modules of these names."""
        matches = [module for module in self.modules if module.name in names]
        return ModuleCount(
            name=", ".join(names),
            modules=sum(module.modules for module in matches),
            parameters=sum(module.parameters for module in matches),
            token_flops=sum(module.token_flops for module in matches),
            pair_flops=sum(module.pair_flops for module in matches),
        )

    @property
    def in_layers(self) -> ModuleCount:
        """The sum over all layers."""
        return self.of(*(f"{stack}.*" for stack in self.stacks))


def count_model(settings: Mapping[str, Any]) -> ModelCounts:
    """Makes the model of a transformers config on the meta device, and counts.

    Raises:
        ConfigError: the settings are those of no model, or of no model of text with attention.
    """
    name = str(settings.get("_name_or_path") or settings.get("model_type"))
    config = _transformers_config(settings, name)
    model = _meta_model(config, name)
    candidates, embedding = _stacks(model), _embedding(model)
    if embedding is None or model.main_input_name != "input_ids":
        raise _not_of_text(config, name, f"takes {model.main_input_name} without one embedding of tokens")
    if not candidates:
        raise _not_of_text(config, name, "has no list of layers")
    text, output = config.get_text_config(), model.get_output_embeddings()
    for size in ("hidden_size", "num_attention_heads", "vocab_size"):
        _size(text, name, size)
    flops = _forward_flops(model)
    stacks = _text_stacks(candidates, flops, bool(getattr(config, "is_encoder_decoder", False)))
    if flops is not None and not any(flops.get(f"{stack}.0", (0.0, 0.0))[0] for stack in stacks):
        flops = None  # the layers of the list are not modules that are called
    if text is config and _outside_layers(model, stacks) > _LARGEST_OUTSIDE:
        raise _not_of_text(config, name, "has many parameters outside one list of layers")
    lengths = [len(model.get_submodule(stack)) for stack in stacks]
    expert_parameters = _expert_parameters(model, stacks, _number_of_experts(text))
    return ModelCounts(
        name=name,
        config=config,
        stacks=tuple(stacks),
        # Some types, such as ALBERT, apply the same layer again and again.
        layers=sum(lengths) if len(stacks) > 1 else max(sum(lengths), _number(text, "num_hidden_layers")),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        experts=_number_of_experts(text) if expert_parameters else 0,
        active_experts=_active_experts(text) if expert_parameters else 0,
        expert_parameters=sum(expert_parameters.values()),
        tied=output is None or output.weight is embedding.weight,
        masked=type(model).__name__.endswith("ForMaskedLM") or bool(getattr(config, "is_encoder_decoder", False)),
        position_rows=_position_rows(model, embedding),
        modules=tuple(_by_name(model, flops or _weight_flops(model, expert_parameters, text))),
        forward=flops is not None,
    )


def _not_of_text(config: Any, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name!r} is a {config.model_type}, which {why}, expected a model of text with one list of layers; give the"
        " sizes of a transformer as layers=24,hidden=2048,..."
    )


def _outside_layers(model: Any, stacks: list[str]) -> float:
    """Parameters that are neither in the layers nor in embeddings and the output layer, relative to the layers'."""
    parts = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedded = {
        id(parameter)
        for part in (*parts, model.get_output_embeddings())
        if part is not None
        for parameter in part.parameters()
    }
    inside, outside = 0, 0
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(f"{stack}." for stack in stacks)):
            inside += parameter.numel()
        elif id(parameter) not in embedded:
            outside += parameter.numel()
    return outside / max(1, inside)


def _position_rows(model: nn.Module, embedding: nn.Embedding) -> int:
    """Rows of other embeddings than that of words, as wide as it is."""
    embeddings = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings.pop(id(embedding.weight), None)
    return sum(table.num_embeddings for table in embeddings.values() if table.embedding_dim == embedding.embedding_dim)


def _transformers_config(settings: Mapping[str, Any], name: str) -> Any:
    """The configuration that the settings of a ``config.json`` describe; raises ConfigError if they describe none."""
    transformers = require("transformers", "transformers")
    types = list(transformers.CONFIG_MAPPING.keys())
    kind = settings.get("model_type")
    if kind not in types:
        near = difflib.get_close_matches(str(kind), types, n=3, cutoff=0.5)
        choose = f"did you mean {' or '.join(near)}?" if near else "give the sizes as layers=24,hidden=2048,..."
        raise ConfigError(
            f"{name!r} has model_type={kind!r}, expected one of the {len(types)} types of transformers; {choose}"
        )
    with _quiet():
        try:
            config = transformers.AutoConfig.for_model(**settings)
            config.get_text_config()  # refuses models with several
        except Exception as error:  # each type checks its settings in its own way
            raise ConfigError(
                f"{name!r} is not the config of a {kind}: {_one_line(error)}; give values that fit"
            ) from error
    return config


def _number_of_experts(config: Any) -> int:
    """The experts of a layer; 0 without."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((value for name in names if (value := _number(config, name))), 0)


def _active_experts(config: Any) -> int:
    """The experts that a token passes through in a layer."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    return next((value for name in names if (value := _number(config, name))), 1)


def _meta_model(config: Any, name: str) -> Any:
    """The model without values, with operations whose shapes follow from the sizes alone."""
    transformers = require("transformers", "transformers")
    make = _model_class(transformers, config)
    config = copy.deepcopy(config)
    with _quiet(), torch.device("meta"):
        try:
            # Attention as plain products, and each token's experts side by side, so that all is counted.
            config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
            model: nn.Module = make(config)
        except Exception as error:  # sizes that do not fit end in whatever the model's code meets first
            raise ConfigError(
                f"{name!r} makes no {config.model_type}: {_one_line(error)}; give sizes that fit each other"
            ) from error
    return model.eval()


def _model_class(transformers: Any, config: Any) -> Any:
    """The class that ``architectures`` names; otherwise a language model of that type, otherwise its body."""
    for architecture in getattr(config, "architectures", None) or ():
        if isinstance(model_class := getattr(transformers, architecture, None), type):
            return model_class
    heads = ["MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"]
    # A model of text and images has a configuration of its text, which some mappings know by the whole's name.
    for head in heads if config.get_text_config() is config else reversed(heads):
        if type(config) in (mapping := getattr(transformers, f"MODEL_FOR_{head}_MAPPING")):
            return mapping[type(config)]
    if type(config) in transformers.MODEL_MAPPING:
        return transformers.MODEL_MAPPING[type(config)]
    raise ConfigError(f"{config.model_type} is the config of a part of a model, expected that of a model of text")


def _embedding(model: Any) -> nn.Embedding | None:
    """The embedding of words; None in models of other things than text."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def _stacks(model: nn.Module) -> dict[str, int]:
    """The lists of layers that are not in another list, with their parameters."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    return sizes


def _text_stacks(sizes: Mapping[str, int], flops: Flops | None, encoder_decoder: bool) -> list[str]:
    """The lists that text passes through: the one that computes most, or an encoder's and a decoder's."""
    if encoder_decoder:
        pair = [name for name in sizes if re.search(r"(^|\.)(encoder|decoder)\.", name)]
        if pair:
            return pair
    computed = {name: (flops or {}).get(f"{name}.0", (0.0, 0.0))[0] > 0 for name in sizes}
    return [max(sizes, key=lambda name: (computed[name], sizes[name]))]


def _expert_parameters(model: nn.Module, stacks: list[str], experts: int) -> dict[str, int]:
    """The parameters of experts by name: three dimensions, of which the first counts the experts."""
    if not experts:
        return {}
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and parameter.shape[0] == experts and name.startswith(tuple(f"{s}." for s in stacks))
    }


Flops = Mapping[str, tuple[float, float]]  # by module: per token, and per pair of tokens


def _forward_flops(model: nn.Module) -> Flops | None:
    """The operations of each module in a forward pass; None if the model's code needs values, which there are not."""
    for masked in (True, False):
        with contextlib.suppress(Exception), _quiet():
            short, long = (_flops(model, length, masked) for length in (_SHORT, _LONG))
            flops = {}
            for name in long:
                pair = (long[name] / _LONG - short.get(name, 0) / _SHORT) / (_LONG - _SHORT)
                flops[name] = (short.get(name, 0) / _SHORT - pair * _SHORT, pair)
            if min(min(counts) for counts in flops.values()) >= 0:  # otherwise they do not grow as attention does
                return flops
    return None


def _flops(model: nn.Module, length: int, masked: bool) -> dict[str, float]:
    """The operations of each module for one sequence."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if masked:
        # Without a mask, some types look at the values of positions.
        inputs |= {"attention_mask": torch.ones_like(ids), "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    root = type(model).__name__
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name != "Global"}
    return {name.removeprefix(root).removeprefix("."): float(count) for name, count in counts.items()}


def _weight_flops(model: Any, experts: Mapping[str, int], config: Any) -> Flops:
    """Two operations for each weight of a matrix that a token meets."""
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = model.get_output_embeddings()
    active = _active_experts(config) / max(1, _number_of_experts(config))
    totals: dict[str, tuple[float, float]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (id(parameter) in lookups and (output is None or parameter is not output.weight)):
            continue
        flops = 2.0 * parameter.numel() * (active if name in experts else 1)
        parts = name.split(".")[:-1]
        for end in range(len(parts) + 1):
            module = ".".join(parts[:end])
            token, pair = totals.get(module, (0.0, 0.0))
            totals[module] = (token + flops, pair)
    return totals


def _by_name(model: nn.Module, flops: Flops) -> Iterator[ModuleCount]:
    """Modules outside the layers' own children are summed in their parents."""
    rows: dict[str, ModuleCount] = {}
    for name, module in model.named_modules():
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        token, pair = flops.get(name, (0.0, 0.0))
        row = rows.get(general, ModuleCount(name=general, modules=0, parameters=0, token_flops=0, pair_flops=0))
        rows[general] = ModuleCount(
            name=general,
            modules=row.modules + 1,
            parameters=row.parameters + sum(parameter.numel() for parameter in module.parameters()),
            token_flops=row.token_flops + token,
            pair_flops=row.pair_flops + pair,
        )
    return iter(rows.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what transformers says of configurations: warnings, and lines of its logger."""
    logging = require("transformers", "transformers").logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _one_line(error: Exception) -> str:
    """What an exception says, in one line without a full stop."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


# The sizes of a counted model.

# Types whose layers save other tensors than those that are usual for their feed-forward layers.
_SAVED = {"gpt2": GPT2_SAVED, "bert": BERT_SAVED, "roberta": BERT_SAVED}


def counted_shape(counts: ModelCounts, sequence: int | None = None) -> ModelShape:
    """The sizes of a counted model: widths and numbers of heads from its config, the rest from its modules.

    Raises:
        ConfigError: the config has no longest sequence, and ``sequence`` is not given.
    """
    config, text, inside = counts.config, counts.config.get_text_config(), counts.in_layers
    layers, experts, active = counts.layers, counts.experts, counts.active_experts
    hidden, heads, vocabulary = (
        _size(text, counts.name, size) for size in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    kv_heads = _number(text, "num_key_value_heads") or heads
    head_size = _number(text, "head_dim") or max(1, hidden // heads)
    matrices = inside.token_flops / 2 / layers
    # What a token meets in feed-forward matrices of a layer, in rows of a hidden vector.
    forward = matrices / hidden - 2 * head_size * (heads + kv_heads) - experts
    inner = _inner_size(text, hidden, experts)
    gated = forward / inner > 2.5 * max(1, active)
    shared = forward / (3 if gated else 2) - active * inner if experts else 0
    window, windowed = _window(text)
    rows = counts.position_rows
    outside = vocabulary * (1 if counts.tied else 2) + rows
    return ModelShape(
        name=counts.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_size=head_size,
        feed_forward=inner,
        vocabulary=vocabulary,
        sequence=_longest_sequence(text, counts) if sequence is None else sequence,
        gated=gated,
        biases=False,
        tied=counts.tied,
        embedding_rows=rows,
        experts=experts,
        active_experts=active,
        shared_feed_forward=max(0, round(shared)),
        causal=not counts.masked,
        window=window,
        windowed=windowed,
        predicted=0.15 if counts.masked else 1.0,
        tensor_plan=config.model_type in MODEL_SPECS or bool(getattr(text, "base_model_tp_plan", None)),
        pipeline_plan=config.model_type in (*MODEL_SPECS, *BODIES) or bool(getattr(text, "base_model_pp_plan", None)),
        saved=_SAVED.get(config.model_type, LLAMA_SAVED if gated else SavedActivations()),
        counted=Counted(
            layer_parameters=inside.parameters / layers,
            layer_matrices=matrices,
            pair_flops=inside.pair_flops / layers if counts.forward else 4.0 * heads * head_size,
            other_parameters=counts.parameters - inside.parameters - outside * hidden,
            idle_parameters=counts.expert_parameters * (1 - active / experts) / layers if experts else 0.0,
        ),
    )


def _longest_sequence(config: Any, counts: ModelCounts) -> int:
    longest = _number(config, "max_position_embeddings")
    if not longest:
        raise ConfigError(
            f"the config of {counts.name!r} says no longest sequence; give the tokens per sequence, as --sequence 2048"
        )
    # RoBERTa keeps two learned positions for padding.
    return longest - longest % 8 if counts.position_rows and longest > 8 else longest


def _size(config: Any, name: str, size: str) -> int:
    if not (value := _number(config, size)):
        setting = getattr(config, size, None)
        raise ConfigError(
            f"the config of {name!r} has {size}={setting!r}, expected a number above 0; give the sizes instead"
        )
    return value


def _number(config: Any, name: str) -> int:
    """A size in a configuration; 0 if there is none."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # it differs between layers: that of the first
        value = getattr(config.per_layer_config[0], name, None)
    return value if isinstance(value, int) and value > 0 else 0


def _inner_size(config: Any, hidden: int, experts: int) -> int:
    """The size of the feed-forward layer, or of an expert, under the name that the type has for it."""
    names = ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "d_ff", "hidden_dim"]
    if experts:
        names = ["moe_intermediate_size", "expert_ffn_hidden_size", *names]
    return next((value for name in names if (value := _number(config, name))), 4 * hidden)


def _window(config: Any) -> tuple[int, float]:
    """Tokens of the sliding window, and the fraction of the layers that have it."""
    window = _number(config, "sliding_window")
    if not window:
        return 0, 1.0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    share = sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
    return (window, share) if share else (0, 1.0)
