"""The sizes of a transformer as numbers, and how to get them: from a name, a folder, a config, or sizes as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lockstep.checks import check_divides, check_least
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """What autograd saves of a layer, in units of a token's hidden vector or of its feed-forward vector.

    The defaults are those of fused programs (Megatron-LM's, by Korthikanti et al. 2022). A norm or an activation that
    is written as several operations saves more.
    """

    norms: int = 2  # hidden vectors that norms save, in the format of the residual stream
    projections: int = 2  # products that take a norm's output; under autocast each saves its own cast copy
    inner: int = 2  # feed-forward vectors
    masks: int = 2  # bytes of dropout masks per value of a hidden vector


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A stack of equal transformer layers between an embedding and a head over the vocabulary.

    GPT-2, BERT and Llama are such stacks; the fields after ``sequence`` tell them apart.

    Example:
        >>> ModelShape(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024).parameters
        124439808
    """

    name: str = "model"  # in tables and messages
    layers: int
    hidden: int
    heads: int  # of attention; divides ``hidden``
    feed_forward: int = 0  # size of the feed-forward layer; ``4 * hidden`` by default
    vocabulary: int
    sequence: int  # tokens per sequence
    kv_heads: int = 0  # key and value heads (grouped queries); ``heads`` by default
    gated: bool = False  # the feed-forward part has three matrices (SwiGLU) instead of two
    biases: bool = True  # matrices have a bias and norms a shift, as in GPT-2 and BERT but not in Llama
    tied: bool = True  # the head uses the embedding's weight
    # rows of learned position and segment embeddings; ``sequence`` by default, 0 with rotary positions
    embedding_rows: int = -1
    predicted: float = 1.0  # fraction of the tokens that the head predicts; below 1 in masked language models
    saved: SavedActivations = field(default_factory=SavedActivations)

    def __post_init__(self) -> None:
        # Defaults that follow from other sizes are filled in, so that equal models compare equal.
        object.__setattr__(self, "feed_forward", self.feed_forward or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.embedding_rows < 0:
            object.__setattr__(self, "embedding_rows", self.sequence)
        check_least(self, 1, "layers", "hidden", "heads", "feed_forward", "vocabulary", "sequence", "kv_heads")
        check_divides("heads", self.heads, ("hidden", self.hidden))
        check_divides("kv_heads", self.kv_heads, ("heads", self.heads))

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Size of the keys, and of the values, of a token."""
        return self.kv_heads * self.head_width

    @property
    def layer_matrices(self) -> int:
        """Weights of a layer's matrices: four of attention, two or three of the feed-forward part."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.feed_forward

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer: the matrices, two norms, and the biases."""
        h, ups = self.hidden, 2 if self.gated else 1
        biases = (h + 2 * self.kv_width + h + ups * self.feed_forward + h + 2 * h) if self.biases else 0
        return self.layer_matrices + biases + 2 * h

    @property
    def final_norm_parameters(self) -> int:
        return (2 if self.biases else 1) * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        rows = self.vocabulary * (1 if self.tied else 2) + self.embedding_rows
        return self.layers * self.layer_parameters + rows * self.hidden + self.final_norm_parameters

    def with_sequence(self, sequence: int) -> ModelShape:
        """The same model with another sequence length; learned positions grow with it if there was one per token."""
        rows = sequence if self.embedding_rows == self.sequence else self.embedding_rows
        return replace(self, sequence=sequence, embedding_rows=rows)


# What transformers' modules save; a test counts it.
BERT_SAVED = SavedActivations(projections=4)
GPT2_SAVED = SavedActivations(inner=5)  # GPT-2's own approximation of GELU is eight operations
LLAMA_SAVED = SavedActivations(norms=4, projections=5, inner=4, masks=0)

_gpt2 = partial(ModelShape, vocabulary=50257, sequence=1024, saved=GPT2_SAVED)
# 15% of the tokens are predicted; two segment embeddings beside the positions.
_bert = partial(ModelShape, vocabulary=30522, sequence=512, embedding_rows=514, predicted=0.15, saved=BERT_SAVED)
_llama: Any = partial(ModelShape, gated=True, biases=False, tied=False, embedding_rows=0, saved=LLAMA_SAVED)
_llama2 = partial(_llama, vocabulary=32000, sequence=4096)
_llama3 = partial(_llama, vocabulary=128256, sequence=8192, kv_heads=8)
_megatron = partial(ModelShape, vocabulary=51200, sequence=2048)

KNOWN_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _bert(name="bert-tiny", layers=2, hidden=128, heads=2),
        _bert(name="mlm", layers=2, hidden=128, heads=2, predicted=96 / 512),  # the recipe's; a test compares them
        _bert(name="bert-base", layers=12, hidden=768, heads=12),
        _bert(name="bert-large", layers=24, hidden=1024, heads=16),
        _gpt2(name="gpt2", layers=12, hidden=768, heads=12),
        _gpt2(name="gpt2-medium", layers=24, hidden=1024, heads=16),
        _gpt2(name="gpt2-large", layers=36, hidden=1280, heads=20),
        _gpt2(name="gpt2-xl", layers=48, hidden=1600, heads=25),
        _llama2(name="llama-2-7b", layers=32, hidden=4096, heads=32, feed_forward=11008),
        _llama2(name="llama-2-13b", layers=40, hidden=5120, heads=40, feed_forward=13824),
        _llama2(name="llama-2-70b", layers=80, hidden=8192, heads=64, feed_forward=28672, kv_heads=8),
        _llama3(name="llama-3-8b", layers=32, hidden=4096, heads=32, feed_forward=14336),
        _llama3(name="llama-3-70b", layers=80, hidden=8192, heads=64, feed_forward=28672),
        _llama3(name="llama-3-405b", layers=126, hidden=16384, heads=128, feed_forward=53248),
        # Narayanan et al. 2021 (arXiv 2104.04473), tables 1 and 2.
        _megatron(name="megatron-1.7b", layers=24, hidden=2304, heads=24),
        _megatron(name="megatron-3.6b", layers=30, hidden=3072, heads=32),
        _megatron(name="megatron-7.5b", layers=36, hidden=4096, heads=32),
        _megatron(name="megatron-18b", layers=40, hidden=6144, heads=48),
        _megatron(name="megatron-39b", layers=48, hidden=8192, heads=64),
        _megatron(name="megatron-76b", layers=60, hidden=10240, heads=80),
        _megatron(name="megatron-145b", layers=80, hidden=12288, heads=96),
        _megatron(name="megatron-310b", layers=96, hidden=16384, heads=128),
        _megatron(name="megatron-530b", layers=105, hidden=20480, heads=128),
        _megatron(name="megatron-1t", layers=128, hidden=25600, heads=160),
        # Korthikanti et al. 2022 (arXiv 2205.05198), table 3.
        _megatron(name="megatron-22b", layers=48, hidden=6144, heads=64),
        _megatron(name="gpt-3", layers=96, hidden=12288, heads=96),
    )
}


def known_shape(name: str) -> ModelShape:
    """The model called ``name``, in any case, with or without an owner before it; raises ConfigError if unknown."""
    short = name.rpartition("/")[2].lower().removesuffix("-uncased").removesuffix("-cased").removesuffix("-hf")
    if short not in KNOWN_SHAPES:
        raise ConfigError(
            f"the model {name!r} is no folder with a config.json and not in the table; give its sizes, its folder, or"
            f" one of {', '.join(KNOWN_SHAPES)}"
        )
    return KNOWN_SHAPES[short]


Model = ModelShape | Mapping[str, Any] | Path | str


def shape_of(model: Model, *, sequence: int | None = None) -> ModelShape:
    """The sizes of ``model``. Nothing is downloaded.

    Args:
        model: a ModelShape; the dictionary of a transformers config; a folder with a config.json, or that file; sizes
            as "layers=24,hidden=2048,heads=16,vocabulary=50257,sequence=1024"; or the name of a well-known model or of
            the recipe mlm.
        sequence: tokens per sequence; by default the longest that the model takes.

    Raises:
        ConfigError: the name or the model family is unknown, or the folder has no config.
    """
    if isinstance(model, ModelShape):
        shape = model
    elif isinstance(model, Mapping):
        shape = _from_settings(model)
    else:
        shape = _from_sizes(str(model)) if "=" in str(model) else _from_path_or_name(str(model))
    return shape if sequence is None else shape.with_sequence(sequence)


def _from_path_or_name(name: str) -> ModelShape:
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        return known_shape(name)
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as the config of a model: {error}; save it again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(file)!r} is not a JSON object, expected the config.json of a transformers model")
    return _from_settings({"_name_or_path": path.name, **settings})


def _from_sizes(text: str) -> ModelShape:
    known = [entry.name for entry in fields(ModelShape) if entry.name not in ("name", "predicted", "saved")]
    sizes: dict[str, Any] = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        if name not in known or not value.isdecimal():
            raise ConfigError(f"{entry!r} is no size of a model, expected NAME=NUMBER; choose of {', '.join(known)}")
        sizes[name] = bool(int(value)) if name in ("gated", "biases", "tied") else int(value)
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary", "sequence") if name not in sizes]
    if missing:
        raise ConfigError(f"the sizes {text!r} lack {', '.join(missing)}; add {missing[0]}=NUMBER")
    return ModelShape(name=f"{sizes['layers']} x {sizes['hidden']}", **sizes)


def _from_settings(settings: Mapping[str, Any]) -> ModelShape:
    """From the dictionary of a transformers config."""
    family = settings.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(
            f"model_type={family!r} is not a family that can be planned; choose one of {', '.join(sorted(_FAMILIES))},"
            " or give the sizes"
        )
    name = str(settings.get("_name_or_path") or family)
    try:
        return _FAMILIES[str(family)](settings, name)
    except KeyError as error:
        raise ConfigError(f"the config of {name!r} lacks {error}, which a {family} has; give the sizes") from error


def _from_gpt2(settings: Mapping[str, Any], name: str) -> ModelShape:
    return ModelShape(
        name=name,
        layers=settings["n_layer"],
        hidden=settings["n_embd"],
        heads=settings["n_head"],
        feed_forward=settings.get("n_inner") or 0,
        vocabulary=settings["vocab_size"],
        sequence=settings["n_positions"],
        tied=settings.get("tie_word_embeddings", True),
        saved=GPT2_SAVED if settings.get("activation_function", "gelu_new") == "gelu_new" else SavedActivations(),
    )


def _from_bert(settings: Mapping[str, Any], name: str) -> ModelShape:
    positions = settings["max_position_embeddings"]
    return _from_common(
        settings,
        name,
        sequence=positions - positions % 8,  # RoBERTa keeps two positions for padding
        embedding_rows=positions + settings.get("type_vocab_size", 2),
        predicted=0.15,
        saved=BERT_SAVED,
    )


def _from_llama(settings: Mapping[str, Any], name: str) -> ModelShape:
    return _from_common(
        settings,
        name,
        kv_heads=settings.get("num_key_value_heads") or 0,
        sequence=settings["max_position_embeddings"],
        embedding_rows=0,
        gated=True,
        biases=False,
        tied=settings.get("tie_word_embeddings", False),
        saved=LLAMA_SAVED,
    )


def _from_common(settings: Mapping[str, Any], name: str, **own: Any) -> ModelShape:
    return ModelShape(
        name=name,
        layers=settings["num_hidden_layers"],
        hidden=settings["hidden_size"],
        heads=settings["num_attention_heads"],
        feed_forward=settings["intermediate_size"],
        vocabulary=settings["vocab_size"],
        **own,
    )


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], str], ModelShape]] = {
    **dict.fromkeys(("bert", "roberta"), _from_bert),
    "gpt2": _from_gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2"), _from_llama),
}
