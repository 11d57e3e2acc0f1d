"""From what people have in hand to a ModelShape: sizes, a recipe's config, a transformers config, a folder, a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import ConfigError
from lockstep.plan.known import known_shape
from lockstep.plan.shape import BERT_KEPT, GPT2_KEPT, LLAMA_KEPT, Kept, ModelShape, size_fields


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


def _gpt2(settings: Mapping[str, Any], name: str) -> ModelShape:
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


def _bert(settings: Mapping[str, Any], name: str) -> ModelShape:
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


def _llama(settings: Mapping[str, Any], name: str) -> ModelShape:
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
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _bert,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
}
