"""From what people have in hand to a ModelShape: sizes, a recipe's config, a transformers config, a folder, a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the program of a layer keeps for its backward pass, counted in values as wide as a token or its inner part.

    The defaults are those of fused programs (Megatron-LM's, by Korthikanti et al. 2022). Where a norm or an activation
    is written as several operations, each keeps its own values.

    Args:
        norms: values as wide as a token that norms keep, in the format of the residual stream.
        projections: products that take a norm's output; under autocast each keeps a copy of its own.
        inner: values as wide as the feed-forward part.
        masks: bytes of dropout masks for each value of a token.
    """

    norms: int = 2
    projections: int = 2
    inner: int = 2
    masks: int = 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A stack of equal transformer layers between an embedding and a head that is as wide as the vocabulary.

    GPT-2, BERT and Llama are such stacks; what differs between them are the fields after ``sequence``.

    Args:
        name: what it is called in tables and messages.
        layers: transformer layers.
        hidden: width of a token's vector.
        heads: attention heads; divides ``hidden``.
        feed_forward: width inside a layer's feed-forward part; 4 times ``hidden`` by default.
        vocabulary: tokens that have an embedding.
        sequence: tokens in a line.
        kv_heads: heads of keys and values, where they are fewer (grouped queries); ``heads`` by default.
        gated: the feed-forward part has three matrices (SwiGLU) in place of two.
        biases: matrices have a bias and norms a shift, as in GPT-2 and BERT; Llama has neither.
        tied: the head multiplies with the word embeddings in place of a matrix of its own.
        embedding_rows: rows of learned embeddings beside the words', of positions and segments; ``sequence`` by
            default, 0 for rotary positions.
        predicted: share of the tokens that the head is asked about; 1 but for masked language models.
        kept: what a layer keeps for its backward pass.

    Example:
        >>> ModelShape(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024).parameters
        124439808
    """

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    feed_forward: int = 0
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    gated: bool = False
    biases: bool = True
    tied: bool = True
    embedding_rows: int = -1
    predicted: float = 1.0
    kept: Kept = field(default_factory=Kept)

    def __post_init__(self) -> None:
        # A size that follows from others is written in once, so that two equal models compare equal.
        for name, value in (
            ("feed_forward", 4 * self.hidden),
            ("kv_heads", self.heads),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.embedding_rows < 0:
            object.__setattr__(self, "embedding_rows", self.sequence)
        for name in ("layers", "hidden", "heads", "feed_forward", "vocabulary", "sequence", "kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected at least 1; see ModelShape")
        self._check_heads()
        if not 0 < self.predicted <= 1:
            raise ConfigError(f"predicted={self.predicted} was given, expected a share above 0 and at most 1")

    def _check_heads(self) -> None:
        for name, whole, part in (("heads", "hidden", self.heads), ("kv_heads", "heads", self.kv_heads)):
            size = getattr(self, whole)
            if size % part:
                raise ConfigError(f"{name}={part} does not divide {whole}={size}; choose {one_of(divisors(size))}")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_width

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer: two norms, four matrices of attention, two or three of the feed-forward part, their biases."""
        h, f = self.hidden, self.feed_forward
        attention = 2 * h * h + 2 * h * self.kv_width
        matrices = attention + (3 if self.gated else 2) * h * f
        ups = 2 if self.gated else 1
        shifts = h + 2 * self.kv_width + h + ups * f + h + 2 * h if self.biases else 0
        return matrices + shifts + 2 * h

    @property
    def embedding_parameters(self) -> int:
        """Of the embeddings before the first layer."""
        return (self.vocabulary + self.embedding_rows) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the last norm and the head's own matrix; a tied head has none."""
        norm = (2 if self.biases else 1) * self.hidden
        return norm + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def parameters(self) -> int:
        """Of the whole model, each tied one counted once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def with_sequence(self, sequence: int) -> ModelShape:
        """The same model on lines of another length; learned positions grow with it where they were as many."""
        rows = sequence if self.embedding_rows == self.sequence else self.embedding_rows
        return replace(self, sequence=sequence, embedding_rows=rows)


# What transformers' modules keep, counted in them: a test counts again.
BERT_KEPT = Kept(projections=4)
# GPT-2's own approximation of GELU is eight operations.
GPT2_KEPT = Kept(inner=5)
LLAMA_KEPT = Kept(norms=4, projections=5, inner=4, masks=0)


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def one_of(choices: list[int], most: int = 12) -> str:
    """``1, 2, 4 or 8``; the middle of a long list is left out."""
    if len(choices) > most:
        return f"{', '.join(map(str, choices[: most - 1]))} ... or {choices[-1]}"
    if len(choices) == 1:
        return str(choices[0])
    return f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"


def size_fields() -> tuple[str, ...]:
    """The names of the fields that are whole numbers or switches, for messages."""
    return tuple(entry.name for entry in fields(ModelShape) if entry.name not in ("name", "predicted", "kept"))


_gpt2 = partial(ModelShape, vocabulary=50257, sequence=1024, kept=GPT2_KEPT)
# As trained: 15% of the tokens are asked about; two rows of segments beside the positions.
_bert = partial(ModelShape, vocabulary=30522, sequence=512, embedding_rows=514, predicted=0.15, kept=BERT_KEPT)
_llama: Any = partial(ModelShape, gated=True, biases=False, tied=False, embedding_rows=0, kept=LLAMA_KEPT)
_llama2 = partial(_llama, vocabulary=32000, sequence=4096)
_llama3 = partial(_llama, vocabulary=128256, sequence=8192, kv_heads=8)
_megatron = partial(ModelShape, vocabulary=51200, sequence=2048)

KNOWN_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _bert(name="bert-tiny", layers=2, hidden=128, heads=2),
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
    """The model called ``name``, in any case, with or without the owner before it.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    short = name.rpartition("/")[2].lower().removesuffix("-uncased").removesuffix("-cased").removesuffix("-hf")
    if short not in KNOWN_SHAPES:
        raise ConfigError(
            f"the model {name!r} is no folder with a config.json and not in the table; give its sizes, its folder, or"
            f" one of {', '.join(KNOWN_SHAPES)}"
        )
    return KNOWN_SHAPES[short]


@runtime_checkable
class SizedConfig(Protocol):
    """A recipe's config that speaks of a transformer, such as ``MlmConfig``."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def feed_forward(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def max_masked(self) -> int: ...


@runtime_checkable
class TransformersConfig(Protocol):
    """What is asked of a transformers ``PretrainedConfig``."""

    def to_dict(self) -> dict[str, Any]: ...


Model = ModelShape | SizedConfig | TransformersConfig | Mapping[str, Any] | Path | str


def shape_of(model: Model, *, sequence: int | None = None) -> ModelShape:
    """The sizes of ``model``.

    Args:
        model: a ModelShape; the config of the recipe mlm; a transformers config, or its dictionary; a folder with a
            config.json, or that file; sizes as "layers=24,hidden=2048,heads=16,vocabulary=50257,sequence=1024"; or a
            name in the table of well-known models. Nothing is downloaded.
        sequence: tokens in a line; by default the model's longest.

    Raises:
        ConfigError: a name that is not known, a folder without a config, or a family of models that is not known.
    """
    shape = _shape_of(model)
    return shape if sequence is None else shape.with_sequence(sequence)


def _shape_of(model: Model) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str | Path):
        return _named(str(model))
    if isinstance(model, Mapping):
        return _from_settings(model)
    if isinstance(model, TransformersConfig):
        return _from_settings(model.to_dict())
    return _from_recipe(model)


def _named(name: str) -> ModelShape:
    if "=" in name:
        return _from_sizes(name)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise ConfigError(f"the folder {name!r} holds no config.json; expected a model saved by transformers")
        return known_shape(name)
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as the config of a model ({error}); save it again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(file)!r} holds no settings by name, expected the config.json of a transformers model")
    return _from_settings({"_name_or_path": path.name, **settings})


def _from_sizes(text: str) -> ModelShape:
    """``layers=24,hidden=2048,heads=16,vocabulary=50257,sequence=1024``: whole numbers by the names of a shape."""
    known = size_fields()
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


def _from_recipe(config: SizedConfig) -> ModelShape:
    return ModelShape(
        name="mlm",
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        feed_forward=config.feed_forward,
        vocabulary=config.vocabulary,
        sequence=config.sequence_length,
        embedding_rows=config.sequence_length + 2,
        predicted=min(1.0, config.max_masked / config.sequence_length),
        kept=BERT_KEPT,
    )


def _from_settings(settings: Mapping[str, Any]) -> ModelShape:
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


def _gpt2_of_read(settings: Mapping[str, Any], name: str) -> ModelShape:
    return ModelShape(
        name=name,
        layers=settings["n_layer"],
        hidden=settings["n_embd"],
        heads=settings["n_head"],
        feed_forward=settings.get("n_inner") or 0,
        vocabulary=settings["vocab_size"],
        sequence=settings["n_positions"],
        embedding_rows=settings["n_positions"],
        tied=settings.get("tie_word_embeddings", True),
        kept=GPT2_KEPT if settings.get("activation_function", "gelu_new") == "gelu_new" else Kept(),
    )


def _bert_of_read(settings: Mapping[str, Any], name: str) -> ModelShape:
    positions = settings["max_position_embeddings"]
    return ModelShape(
        name=name,
        layers=settings["num_hidden_layers"],
        hidden=settings["hidden_size"],
        heads=settings["num_attention_heads"],
        feed_forward=settings["intermediate_size"],
        vocabulary=settings["vocab_size"],
        # RoBERTa keeps two positions for padding.
        sequence=positions - positions % 8,
        embedding_rows=positions + settings.get("type_vocab_size", 2),
        predicted=0.15,
        kept=BERT_KEPT,
    )


def _llama_of_read(settings: Mapping[str, Any], name: str) -> ModelShape:
    return ModelShape(
        name=name,
        layers=settings["num_hidden_layers"],
        hidden=settings["hidden_size"],
        heads=settings["num_attention_heads"],
        kv_heads=settings.get("num_key_value_heads") or 0,
        feed_forward=settings["intermediate_size"],
        vocabulary=settings["vocab_size"],
        sequence=settings["max_position_embeddings"],
        embedding_rows=0,
        gated=True,
        biases=False,
        tied=settings.get("tie_word_embeddings", False),
        kept=LLAMA_KEPT,
    )


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], str], ModelShape]] = {
    "gpt2": _gpt2_of_read,
    "bert": _bert_of_read,
    "roberta": _bert_of_read,
    "llama": _llama_of_read,
    "mistral": _llama_of_read,
    "qwen2": _llama_of_read,
}
