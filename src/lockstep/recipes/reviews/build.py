"""From a ``ReviewsConfig`` to the parts of a training run: reviews, tokenizer, rows of tokens, model.

    reviews -> train, valid, test -> tokenizer -> rows
                                         \\-> model

Everything here is plain transformers and PyTorch: nothing knows how many replicas there will be.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.quiet import quiet_transformers
from lockstep.recipes.reviews.config import NAMES_OF_TWO, ReviewsConfig
from lockstep.recipes.reviews.csv_file import read_csv
from lockstep.recipes.reviews.embedded import read_embedded
from lockstep.recipes.reviews.model import longest_row, make_model
from lockstep.recipes.reviews.parts import Division, ReviewParts, divide
from lockstep.recipes.reviews.table import Review, ReviewTable
from lockstep.recipes.reviews.tokens import ReviewRows, encode, load_tokenizer, new_tokenizer

CPU = torch.device("cpu")
_BROUGHT = ("tokens", "vocabulary", "layers", "hidden", "heads", "feed_forward", "dropout")


@dataclass(frozen=True, kw_only=True)
class ReviewsTask:
    """The parts of a run.

    Args:
        model: a transformers model, on the CPU; a PeftModel where there are adapters.
        tokenizer: a transformers tokenizer.
        train: rows, with other tokens hidden in every epoch.
        valid: rows that stay as they are.
        test: rows that stay as they are.
        names: of the classes, in the order of the logits.
        table: the reviews as they were read.
        parts: the reviews as they are used.
    """

    model: Any
    tokenizer: Any
    train: ReviewRows
    valid: ReviewRows
    test: ReviewRows
    names: tuple[str, ...]
    table: ReviewTable
    parts: ReviewParts


def build_reviews(config: ReviewsConfig, *, device: torch.device = CPU) -> ReviewsTask:
    """Reads the reviews, makes or loads tokenizer and model, and turns the reviews into tokens, once.

    Args:
        config: the run.
        device: of the first replica.

    Raises:
        DataError: the reviews cannot be used.
        ConfigError: the pretrained model or the names cannot be used.
    """
    table = read_table(config)
    parts = divide_table(config, table)
    names = class_names(config, parts.labels)
    with quiet_transformers(extra="text"):
        tokenizer = _tokenizer(config, [review.text for review in parts.train])
        model = make_model(config, tokenizer, names, device=device)
        limit = longest_row(config, model)
        hide = config.hidden_share if tokenizer.mask_token_id is not None else 0.0
        return ReviewsTask(
            model=model,
            tokenizer=tokenizer,
            train=_rows(parts.train, parts, tokenizer, limit, hide=hide, seed=config.seed),
            valid=_rows(parts.valid, parts, tokenizer, limit),
            test=_rows(parts.test, parts, tokenizer, limit),
            names=names,
            table=table,
            parts=parts,
        )


def read_table(config: ReviewsConfig) -> ReviewTable:
    """The reviews that the config names, or the embedded ones."""
    if config.csv is None:
        return read_embedded()
    return read_csv(config.csv.expanduser(), encoding=config.encoding, separator=config.delimiter)


def divide_table(config: ReviewsConfig, table: ReviewTable) -> ReviewParts:
    """The reviews in three parts, as the config says."""
    how = Division(
        test_share=config.test_share,
        valid_share=config.valid_share,
        keep_repeated=config.repeated == "keep",
        limit=config.limit,
        seed=config.seed,
    )
    return divide(table, how)


def class_names(config: ReviewsConfig, labels: Sequence[int]) -> tuple[str, ...]:
    """What the classes are called.

    Raises:
        ConfigError: there are not as many different names as classes.
    """
    if config.names is None:
        return NAMES_OF_TWO if len(labels) == 2 else tuple(str(label) for label in labels)
    names = tuple(name.strip() for name in config.names.split(","))
    if len(set(names)) != len(labels) or not all(names):
        raise ConfigError(
            f"names={config.names!r} was given for the {len(labels)} classes {', '.join(map(str, labels))}; expected as"
            " many different names, with commas between"
        )
    return names


def build_collator(task: ReviewsTask) -> Any:
    """Pads the rows of a batch to the longest of them, and a multiple of 8 as matrix kernels take whole vectors."""
    return require("transformers", "text").DataCollatorWithPadding(task.tokenizer, pad_to_multiple_of=8)


def _tokenizer(config: ReviewsConfig, texts: Sequence[str]) -> Any:
    if config.pretrained is not None:
        _warn_of_ignored(config)
        return load_tokenizer(config.pretrained)
    if config.lora is not None:
        warnings.warn(
            f"lora={config.lora!r} trains adapters beside frozen weights, which are random here and stay so; give"
            " pretrained weights",
            stacklevel=3,
        )
    return new_tokenizer(texts, config.tokenizer, max_tokens=config.max_tokens, cache_dir=config.cache_dir)


def _warn_of_ignored(config: ReviewsConfig) -> None:
    defaults = {field.name: field.default for field in fields(ReviewsConfig)}
    brought = [name for name in _BROUGHT if getattr(config, name) != defaults[name]]
    if brought:
        warnings.warn(
            f"{', '.join(brought)} have no effect with pretrained={config.pretrained!r}, which brings its own",
            stacklevel=4,
        )


def _rows(
    reviews: Sequence[Review], parts: ReviewParts, tokenizer: Any, limit: int, *, hide: float = 0.0, seed: int = 0
) -> ReviewRows:
    encoded = encode(tokenizer, [review.text for review in reviews], max_tokens=limit)
    classes = [parts.labels.index(review.label) for review in reviews]
    return ReviewRows(encoded, classes, hide=hide, mask_id=tokenizer.mask_token_id or 0, seed=seed)
