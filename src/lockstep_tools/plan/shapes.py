"""How to get the sizes of a transformer: from a name, a folder, a config, or sizes as text.

The model of a transformers config is made on the meta device and counted (``counting``), whatever its type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep_tools.plan.model_shape import BERT_SAVED, GPT2_SAVED, LLAMA_SAVED, ModelShape

_gpt2 = partial(ModelShape, vocabulary=50257, sequence=1024, saved=GPT2_SAVED)
# 15% of the tokens are predicted; two segment embeddings beside the positions.
_bert = partial(
    ModelShape, vocabulary=30522, sequence=512, embedding_rows=514, predicted=0.15, causal=False, saved=BERT_SAVED
)
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
        model: a ModelShape; the dictionary of a transformers config; a folder with a config.json, or that file; a type
            of transformers with its settings, as "type=mixtral,num_hidden_layers=16"; sizes, as
            "layers=24,hidden=2048,heads=16,vocabulary=50257,sequence=1024"; or the name of a well-known model or of the
            recipe mlm.
        sequence: tokens per sequence; by default the longest that the model takes.

    Raises:
        ConfigError: the name or the type is unknown, there is no config, or its sizes make no model.
    """
    if isinstance(model, ModelShape):
        shape = model
    elif (settings := config_settings(model)) is not None:
        from lockstep_tools.plan.counting import (  # imports torch, which mere sizes do not need
            count_model,
            counted_shape,
        )

        shape = counted_shape(count_model(settings), sequence)
    elif "=" in str(model):
        shape = _from_sizes(str(model))
    else:
        shape = known_shape(str(model))
    return shape if sequence is None else shape.with_sequence(sequence)


def config_settings(model: Mapping[str, Any] | Path | str) -> Mapping[str, Any] | None:
    """The settings of a transformers config: given, of a type, a folder or a file; None for a mere name, and sizes."""
    if isinstance(model, Mapping):
        return model
    text = str(model)
    if text.lstrip().startswith("type="):
        return _typed_settings(text)
    path = Path(text).expanduser()
    if not path.exists():
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as the config of a model: {error}; save it again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(file)!r} is not a JSON object, expected the config.json of a transformers model")
    return {**settings, "_name_or_path": path.resolve().name}


def _typed_settings(text: str) -> Mapping[str, Any]:
    """From "type=mixtral,num_hidden_layers=16": settings by the names of that type's config, the rest by default."""
    settings: dict[str, Any] = {}
    for entry in text.split(","):
        name, equals, value = entry.strip().partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{entry!r} is no setting of a config, expected NAME=VALUE, as num_hidden_layers=16")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return {"model_type": settings.pop("type"), **settings}


def _from_sizes(text: str) -> ModelShape:
    out = ("name", "predicted", "saved", "counted", "windowed", "tensor_plan", "pipeline_plan")
    names = [entry.name for entry in fields(ModelShape) if entry.name not in out]
    sizes: dict[str, Any] = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        if name not in names or not value.isdecimal():
            raise ConfigError(f"{entry!r} is no size of a model, expected NAME=NUMBER; choose of {', '.join(names)}")
        sizes[name] = bool(int(value)) if name in ("gated", "biases", "tied", "causal") else int(value)
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary", "sequence") if name not in sizes]
    if missing:
        raise ConfigError(f"the sizes {text!r} lack {', '.join(missing)}; add {missing[0]}=NUMBER")
    return ModelShape(name=f"{sizes['layers']} x {sizes['hidden']}", **sizes)
