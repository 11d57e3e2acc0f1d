"""A BERT with weights, and its own tokenizer, by folder or Hugging Face name, through transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.hub import check_kind, load_named
from lockstep.recipes.mlm.model import MaskedLanguageModel
from lockstep.recipes.text.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What was loaded: the module and the vocabulary that belongs to it."""

    module: MaskedLanguageModel
    vocabulary: Vocabulary


def load_pretrained(name: str, *, attention: str, dropout: float) -> Pretrained:
    """Loads a BERT and its tokenizer.

    Args:
        name: folder written by ``save_pretrained`` or by this recipe, or a Hugging Face name.
        attention: transformers' name of an attention implementation.
        dropout: probability, for activations and attention weights.

    Raises:
        ConfigError: not found, unreadable, or no BERT with a tokenizer that can mask.
    """
    transformers = require("transformers", "text")
    check_kind(
        name, load_named(name, transformers.AutoConfig, extra="text"), kind="bert", example="prajjwal1/bert-tiny"
    )
    whole = load_named(
        name,
        transformers.BertForPreTraining,
        extra="text",
        attn_implementation=attention,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    vocabulary = _vocabulary(name, load_named(name, transformers.AutoTokenizer, extra="text"))
    if vocabulary.size > whole.config.vocab_size:
        raise ConfigError(
            f"pretrained={name!r} has {whole.config.vocab_size} embeddings for a tokenizer of {vocabulary.size} tokens;"
            " expected one for each; give weights and tokenizer that belong together"
        )
    return Pretrained(module=MaskedLanguageModel(whole.bert, whole.cls.predictions), vocabulary=vocabulary)


def _vocabulary(name: str, tokenizer: Any) -> Vocabulary:
    if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
        raise ConfigError(
            f"pretrained={name!r} has a tokenizer without a mask or padding token; expected BERT's [MASK] and [PAD];"
            " give a folder whose tokenizer was saved with its special tokens"
        )
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "unk", "cls", "sep", "mask")}
    known = {kind: number for kind, number in ids.items() if number is not None}
    return Vocabulary(tokenizer=tokenizer.backend_tokenizer, named_ids=known)
