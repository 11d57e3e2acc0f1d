r"""The parts of a run of the recipe ``reviews``: reviews, tokenizer, token rows, model.

    reviews -> train, valid, test -> tokenizer -> token rows
                                         \-> model

The parts are plain transformers and PyTorch: they do not depend on the number of replicas.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep_tools.recipes.from_hub import (
    check_embeddings,
    label_names,
    load_named,
    quiet_transformers,
    warn_of_ignored,
)
from lockstep_tools.recipes.memory import loading, with_choices
from lockstep_tools.recipes.reviews.batches import ReviewRows
from lockstep_tools.recipes.reviews.config import BINARY_NAMES, ReviewsConfig
from lockstep_tools.recipes.reviews.dataset import Review, ReviewSplits, ReviewTable, read_table, split_reviews
from lockstep_tools.recipes.text.tokenizer import encode, load_tokenizer, new_tokenizer

CPU = torch.device("cpu")
_SET_BY_PRETRAINED = ("vocabulary", "layers", "hidden", "heads", "feed_forward", "dropout")


@dataclass(frozen=True, kw_only=True)
class ReviewsTask:
    """The parts of a run: a transformers model on the CPU (a PeftModel if it has adapters), its tokenizer, the rows.

    ``names`` are the classes in the order of the logits. In training other tokens are masked in every epoch.
    """

    model: Any
    tokenizer: Any
    train: ReviewRows
    valid: ReviewRows
    test: ReviewRows
    names: tuple[str, ...]
    table: ReviewTable
    splits: ReviewSplits


def build_reviews(config: ReviewsConfig, *, device: torch.device = CPU) -> ReviewsTask:
    """Reads the reviews, makes or loads tokenizer and model, and tokenizes the reviews.

    ``device`` is that of the first replica, on which 8-bit and 4-bit weights are loaded. Raises a DataError if the
    reviews cannot be used, and a ConfigError if the pretrained model or the names cannot be used.
    """
    table = read_table(config)
    splits = split_reviews(table, config)
    names = class_names(config, splits.labels)
    with quiet_transformers():
        tokenizer = _tokenizer(config, [review.text for review in splits.train])
        model = _model(config, tokenizer, names, device=device)
        max_tokens = max_row_length(config, model)
        hide = config.hidden_fraction if tokenizer.mask_token_id is not None else 0.0

        def rows(reviews: Sequence[Review], hide: float = 0.0) -> ReviewRows:
            encoded = encode(tokenizer, [review.text for review in reviews], max_tokens=max_tokens)
            classes = [splits.labels.index(review.label) for review in reviews]
            return ReviewRows(encoded, classes, hide=hide, mask_id=tokenizer.mask_token_id or 0, seed=config.seed)

        return ReviewsTask(
            model=model,
            tokenizer=tokenizer,
            train=rows(splits.train, hide),
            valid=rows(splits.valid),
            test=rows(splits.test),
            names=names,
            table=table,
            splits=splits,
        )


def class_names(config: ReviewsConfig, labels: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of the classes; raises ConfigError if there are not as many different names as classes."""
    if config.names is None:
        return BINARY_NAMES if len(labels) == 2 else tuple(str(label) for label in labels)
    names = tuple(name.strip() for name in config.names.split(","))
    if len(set(names)) != len(labels) or not all(names):
        raise ConfigError(
            f"names={config.names!r} was given for {len(labels)} classes; expected as many names, separated by commas"
        )
    return names


def build_collator(task: ReviewsTask) -> Any:
    """Returns a collator that pads a batch to its longest row, and to a multiple of 8 for the matrix kernels."""
    return require("transformers", "text").DataCollatorWithPadding(task.tokenizer, pad_to_multiple_of=8)


def max_row_length(config: ReviewsConfig, model: Any) -> int:
    """Returns the maximum number of tokens in a row: that of the config or of the model, whichever is smaller."""
    return min(config.max_tokens, getattr(model.config, "max_position_embeddings", config.max_tokens))


def _tokenizer(config: ReviewsConfig, texts: Sequence[str]) -> Any:
    if config.pretrained is not None:
        warn_of_ignored(config, _SET_BY_PRETRAINED)
        return load_tokenizer(config.pretrained)
    if config.lora is not None:
        warnings.warn(
            f"lora={config.lora!r} trains adapters beside frozen weights, which are random without pretrained weights;"
            " set pretrained",
            stacklevel=3,
        )
    return new_tokenizer(texts, config.tokenizer, max_tokens=config.max_tokens)


def _model(config: ReviewsConfig, tokenizer: Any, names: Sequence[str], *, device: torch.device) -> Any:
    """A BertForSequenceClassification with random weights, or a pretrained model; adapters are added if wanted.

    The head of a pretrained model is kept if it has as many classes, else its weights are random.
    """
    # The weights depend on the config's seed alone, and the caller's random numbers go on as before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.pretrained is None:
            bert = require("transformers.models.bert.modeling_bert", "text")
            bert_config = bert.BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=config.hidden,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=config.feed_forward,
                max_position_embeddings=config.max_tokens,
                hidden_dropout_prob=config.dropout,
                attention_probs_dropout_prob=config.dropout,
                pad_token_id=tokenizer.pad_token_id,
                **label_names(names),
            )
            model = bert.BertForSequenceClassification(bert_config)
        else:
            kind = require("transformers", "text").AutoModelForSequenceClassification
            settings = {**label_names(names), **loading(config.memory, device), "ignore_mismatched_sizes": True}
            model = load_named(config.pretrained, kind, **settings)
            check_embeddings(config.pretrained, model.config.vocab_size, len(tokenizer))
        return with_choices(model, config.memory, task="SEQ_CLS")
