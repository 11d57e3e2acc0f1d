"""A BERT with weights, and its own tokenizer, by folder or Hugging Face name, through transformers.

A folder is never looked up elsewhere. A name is looked for in the local Hugging Face cache first, so that a machine
without a network answers at once for what it has.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.mlm.model import MaskedLanguageModel
from lockstep.recipes.text.vocabulary import Vocabulary

_HUB_TIMEOUT_S = 10.0


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
    _check_kind(name, _load(name, transformers.AutoConfig))
    whole = _load(
        name,
        transformers.BertForPreTraining,
        attn_implementation=attention,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    vocabulary = _vocabulary(name, _load(name, transformers.AutoTokenizer))
    if vocabulary.size > whole.config.vocab_size:
        raise ConfigError(
            f"pretrained={name!r} has {whole.config.vocab_size} embeddings for a tokenizer of {vocabulary.size} tokens;"
            " expected one for each; give weights and tokenizer that belong together"
        )
    return Pretrained(module=MaskedLanguageModel(whole.bert, whole.cls.predictions), vocabulary=vocabulary)


def _load(name: str, kind: Any, **settings: Any) -> Any:
    """``kind.from_pretrained(name)``, from this machine if it is there, else over the network."""
    safetensors = require("safetensors", "text")
    failures = (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError)
    try:
        return kind.from_pretrained(name, local_files_only=True, **settings)
    except failures as error:
        if Path(name).exists() or _is_path(name):
            raise _unusable(name, error) from error
    _check_network(name)
    try:
        return kind.from_pretrained(name, **settings)
    except failures as error:
        raise _unusable(name, error) from error


def _check_network(name: str) -> None:
    """Asks the hub for nothing, once: its own client would try for half a minute and write a line for each attempt."""
    hub: str = require("huggingface_hub.constants", "text").ENDPOINT
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # it answered
        return
    except OSError as error:
        raise ConfigError(
            f"pretrained={name!r} is neither a folder nor in the local Hugging Face cache, and {hub} cannot be reached"
            f" ({error}); give a folder written by save_pretrained, or connect to the network once"
        ) from error


def _is_path(name: str) -> bool:
    """Whether a name can only mean a place on this machine: Hugging Face's have at most one slash, inside."""
    return name.count("/") > 1 or name.startswith(("/", ".", "~"))


def _unusable(name: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:160]
    return ConfigError(
        f"pretrained={name!r} could not be loaded ({type(error).__name__}: {reason}); expected a folder written by"
        " save_pretrained, or a Hugging Face name; check the path, or the name and the network"
    )


def _check_kind(name: str, config: Any) -> None:
    if config.model_type != "bert":
        raise ConfigError(
            f"pretrained={name!r} is a model of type {config.model_type!r}, expected 'bert'; give the folder or name"
            " of a BERT, such as 'prajjwal1/bert-tiny'"
        )


def _vocabulary(name: str, tokenizer: Any) -> Vocabulary:
    if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
        raise ConfigError(
            f"pretrained={name!r} has a tokenizer without a mask or padding token; expected BERT's [MASK] and [PAD];"
            " give a folder whose tokenizer was saved with its special tokens"
        )
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "unk", "cls", "sep", "mask")}
    known = {kind: number for kind, number in ids.items() if number is not None}
    return Vocabulary(tokenizer=tokenizer.backend_tokenizer, named_ids=known)
