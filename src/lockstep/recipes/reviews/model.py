"""``BertForSequenceClassification``, new or pretrained, and with adapters where LoRA is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.from_hub import load_named
from lockstep.recipes.memory import loading, with_choices
from lockstep.recipes.reviews.config import ReviewsConfig


def make_model(config: ReviewsConfig, tokenizer: Any, names: Sequence[str], *, device: torch.device) -> Any:
    """The model of a run, on the CPU; what is drawn for it depends on the seed alone.

    Args:
        config: the run.
        tokenizer: its tokens.
        names: of the classes, in the order of the logits.
        device: of the first replica, where weights in 8 or 4 bit are loaded.

    Raises:
        ConfigError: the pretrained model cannot be used, or takes no adapters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.pretrained is None:
            model = _new(config, tokenizer, names)
        else:
            model = _loaded(config.pretrained, tokenizer, **_named(names), **loading(config.memory, device))
        return with_choices(model, config.memory, task="SEQ_CLS")


def longest_row(config: ReviewsConfig, model: Any) -> int:
    """The longest row that the recipe makes and the model takes, in tokens."""
    return min(config.max_tokens, getattr(model.config, "max_position_embeddings", config.max_tokens))


def _new(config: ReviewsConfig, tokenizer: Any, names: Sequence[str]) -> Any:
    bert = require("transformers.models.bert.modeling_bert", "text")
    return bert.BertForSequenceClassification(
        bert.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=config.max_tokens,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            pad_token_id=tokenizer.pad_token_id,
            **_named(names),
        )
    )


def _loaded(name: str, tokenizer: Any, **settings: Any) -> Any:
    """The pretrained model; its head is kept where it has as many classes, and else drawn anew."""
    transformers = require("transformers", "text")
    kind = transformers.AutoModelForSequenceClassification
    model = load_named(name, kind, extra="text", ignore_mismatched_sizes=True, **settings)
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"pretrained={name!r} has {model.config.vocab_size} embeddings for a tokenizer of {len(tokenizer)} tokens;"
            " expected one for each; give weights and tokenizer that belong together"
        )
    return model


def _named(names: Sequence[str]) -> dict[str, Any]:
    """The names of the logits as transformers' configs keep them."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
