r"""The parts of a run of the recipe ``reviews``: reviews, tokenizer, token rows, model.

    reviews -> train, valid, test -> tokenizer -> token rows
                                         \-> model

The parts are plain transformers and PyTorch: they do not depend on the number of replicas.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.from_hub import load_named, quiet_transformers
from lockstep.recipes.memory import loading, with_choices
from lockstep.recipes.reviews.batches import ReviewRows, encode, load_tokenizer, new_tokenizer
from lockstep.recipes.reviews.config import BINARY_NAMES, ReviewsConfig
from lockstep.recipes.reviews.dataset import (
    Review,
    ReviewSplits,
    ReviewTable,
    SplitSettings,
    read_csv,
    read_embedded,
    split_reviews,
)

CPU = torch.device("cpu")
_SET_BY_PRETRAINED = ("tokens", "vocabulary", "layers", "hidden", "heads", "feed_forward", "dropout")


@dataclass(frozen=True, kw_only=True)
class ReviewsTask:
    """The parts of a run.

    Args:
        model: a transformers model on the CPU; a PeftModel if there are adapters.
        tokenizer: a transformers tokenizer.
        train: training rows, with other tokens masked in every epoch.
        valid: validation rows.
        test: test rows.
        names: names of the classes, in the order of the logits.
        table: the reviews as they were read.
        splits: the reviews of the run.
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

    Args:
        config: the configuration of the run.
        device: device of the first replica, on which 8-bit and 4-bit weights are loaded.

    Raises:
        DataError: the reviews cannot be used.
        ConfigError: the pretrained model or the names cannot be used.
    """
    table = read_table(config)
    splits = split_table(config, table)
    names = class_names(config, splits.labels)
    with quiet_transformers(extra="text"):
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


def read_table(config: ReviewsConfig) -> ReviewTable:
    """Reads the reviews of the config, or the embedded ones."""
    if config.data is None:
        return read_embedded()
    return read_csv(config.data.expanduser(), encoding=config.encoding, separator=config.delimiter)


def split_table(config: ReviewsConfig, table: ReviewTable) -> ReviewSplits:
    """Splits the reviews as the config says."""
    settings = SplitSettings(
        test_fraction=config.test_fraction,
        valid_fraction=config.valid_fraction,
        keep_repeated=config.repeated == "keep",
        limit=config.limit,
        seed=config.seed,
    )
    return split_reviews(table, settings)


def class_names(config: ReviewsConfig, labels: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of the classes.

    Raises:
        ConfigError: there are not as many different names as classes.
    """
    if config.names is None:
        return BINARY_NAMES if len(labels) == 2 else tuple(str(label) for label in labels)
    names = tuple(name.strip() for name in config.names.split(","))
    if len(set(names)) != len(labels) or not all(names):
        raise ConfigError(
            f"names={config.names!r} was given for the {len(labels)} classes {', '.join(map(str, labels))}; expected as"
            " many different names, separated by commas"
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
        defaults = {field.name: field.default for field in fields(ReviewsConfig)}
        ignored = [name for name in _SET_BY_PRETRAINED if getattr(config, name) != defaults[name]]
        if ignored:
            warnings.warn(
                f"{', '.join(ignored)} have no effect with pretrained={config.pretrained!r}, which has its own",
                stacklevel=3,
            )
        return load_tokenizer(config.pretrained)
    if config.lora is not None:
        warnings.warn(
            f"lora={config.lora!r} trains adapters beside frozen weights, which are random without pretrained weights;"
            " set pretrained",
            stacklevel=3,
        )
    return new_tokenizer(texts, config.tokenizer, max_tokens=config.max_tokens, cache_dir=config.cache_dir)


def _model(config: ReviewsConfig, tokenizer: Any, names: Sequence[str], *, device: torch.device) -> Any:
    """A BertForSequenceClassification with random weights, or a pretrained model; adapters are added if wanted."""
    label_names = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
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
                **label_names,
            )
            model = bert.BertForSequenceClassification(bert_config)
        else:
            model = _load_model(config.pretrained, tokenizer, **label_names, **loading(config.memory, device))
        return with_choices(model, config.memory, task="SEQ_CLS")


def _load_model(name: str, tokenizer: Any, **settings: Any) -> Any:
    """A pretrained model; its head is kept if it has as many classes, else its weights are random."""
    transformers = require("transformers", "text")
    kind = transformers.AutoModelForSequenceClassification
    model = load_named(name, kind, extra="text", ignore_mismatched_sizes=True, **settings)
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"pretrained={name!r} has {model.config.vocab_size} embeddings for a tokenizer of {len(tokenizer)} tokens;"
            " expected an embedding for each; give weights and a tokenizer that belong together"
        )
    return model
